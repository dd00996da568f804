//! Cloning a git remote into a workspace.
//!
//! The sandbox of a clone reaches the network only through the egress proxy, which refuses loopback, private and
//! metadata addresses, for every connection anew: a redirect leads no further than the URL may. The only identities in
//! it are those that `[git]` names for this remote, or the URL itself.

use std::{
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use oubliette_egress::{EgressRefusal, OnRefusal, SandboxListener};
use oubliette_os::{DescriptorWorker, PassedDescriptors, UntrustedListener, UntrustedSocket};
use oubliette_protocol::{Error, ErrorCode, ProjectId, Result, id::quoted};
use oubliette_sandbox::{BindMount, IsolationLevel, PortForward, SocketMount, spec::CLIENT};
use parking_lot::Mutex;
use secrecy::{ExposeSecret as _, SecretString};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    output::GitOutput,
    remote::{GitRemote, GitTransport, UrlCredentials},
    sandboxed::{GitSandboxes, GitScript, SOCKET_PREFIX, WORK_TREE},
};
use crate::config::GitCredential;

/// The proxy's socket inside.
const PROXY_SOCKET: &str = "/run/oubliette/proxy.sock";
/// The proxy's port inside.
const PROXY_PORT: u16 = 3128;
/// Paths inside of the key and the host keys for ssh.
const SSH_KEY: &str = "/git/ssh_key";
const KNOWN_HOSTS: &str = "/git/known_hosts";
/// Certificates inside, if the server's environment names a file of its own.
const CERTIFICATES: &str = "/git/certificates.pem";
/// Exit code of the script when the ref is not in the repository.
const NO_SUCH_REF: i32 = 3;
/// Maximum length of git's own words in an error, in characters.
const MAX_REASON_CHARS: usize = 300;

/// Clones `$1` and checks out `$2`, or the default branch if that is empty. `$3` is the program that connects through
/// the proxy, for `git://`.
///
/// The global configuration is for `git upload-pack` of a repository on this machine, which gets no setting from the
/// environment. A ref is a branch of the remote if there is one, else a tag or commit; never a path of that name.
const CLONE: &str = r#"
    export GIT_CONFIG_GLOBAL="$TMPDIR/gitconfig"
    printf '[safe]\n\tdirectory = *\n' >"$GIT_CONFIG_GLOBAL" || exit 125
    if [ -n "$3" ]; then
        export GIT_PROXY_COMMAND="$TMPDIR/connect"
        printf '#!/bin/sh\nexec %s "$@"\n' "$3" >"$GIT_PROXY_COMMAND" && chmod 700 "$GIT_PROXY_COMMAND" || exit 125
    fi
    set -- "$1" "$2" --quiet --no-hardlinks --no-recurse-submodules --template=
    url=$1 ref=$2
    shift 2
    if [ -z "$ref" ]; then
        exec git clone "$@" -- "$url" .
    fi
    git clone "$@" --no-checkout -- "$url" . || exit
    if git rev-parse --verify --quiet --end-of-options "refs/remotes/origin/$ref" >/dev/null; then
        git checkout --quiet --force -B "$ref" --track "origin/$ref" -- || exit 3
    else
        git checkout --quiet --force --detach "$ref" -- || exit 3
    fi
"#;

/// Answers git's question for credentials from the environment.
const CREDENTIAL_HELPER: &str =
    r#"!printf "username=%s\npassword=%s\n" "$OUBLIETTE_GIT_USERNAME" "$OUBLIETTE_GIT_PASSWORD"; :"#;

impl GitSandboxes {
    /// Clones a remote into an empty folder; an error if the result is larger than a workspace may be.
    pub async fn clone_remote(&self, project: &ProjectId, remote: &GitRemote, dir: &Path) -> Result<()> {
        let mut script = GitScript::new(CLONE, self.config.clone_timeout);
        let reference = remote.reference.clone().unwrap_or_default();
        script.arguments = vec![remote.url.clone(), reference.clone(), String::new()];
        script.mounts.push(BindMount::read_write(dir, WORK_TREE));
        script.written = Some(dir.to_owned());
        let allow_file = matches!(remote.transport, GitTransport::Local(_));
        script.settings.push((
            "protocol.file.allow".into(),
            if allow_file { "always" } else { "never" }.into(),
        ));
        let proxy = match &remote.transport {
            GitTransport::Local(path) => {
                script.mounts.push(BindMount::read_only(path, path));
                None
            }
            GitTransport::Http { .. } | GitTransport::Ssh | GitTransport::Git => {
                Some(self.add_network(&mut script, remote)?)
            }
        };
        let secret = self.add_identity(&mut script, remote)?;
        let output = self.run(project, script).await.map_err(|mut error| {
            error.message = format!("source.git: {} was not cloned: {}", remote.url, error.message);
            error
        })?;
        if output.success() {
            return Ok(());
        }
        let stderr = match &secret {
            Some(secret) => output.stderr.replace(secret.expose_secret(), "***"),
            None => output.stderr.clone(),
        };
        if output.code() == Some(NO_SUCH_REF) {
            let missing = format!("source.ref: {} is not in {}", quoted(&reference), remote.url);
            return Err(Error::invalid(missing).with_cause(stderr.trim()));
        }
        let refusal = proxy.as_ref().and_then(|proxy| proxy.refusal.lock().clone());
        Err(clone_error(remote, &output, &stderr, refusal))
    }

    /// Serves the proxy for one clone, until the returned value is dropped.
    fn add_network(&self, script: &mut GitScript, remote: &GitRemote) -> Result<CloneProxy> {
        if self.level() != IsolationLevel::Namespaces {
            return Err(Error::unavailable(format!(
                "source.git: {} cannot be cloned: at isolation level {} no sandbox reaches the network; install \
                 bubblewrap on the server",
                remote.url,
                self.level()
            )));
        }
        let proxy = CloneProxy::serve(self)?;
        script.sockets.push(SocketMount::new(&proxy.socket, PROXY_SOCKET));
        script.forwards.push(PortForward {
            port: PROXY_PORT,
            socket: PROXY_SOCKET.into(),
        });
        script
            .settings
            .push(("http.proxy".into(), format!("http://127.0.0.1:{PROXY_PORT}")));
        if let GitTransport::Git = remote.transport {
            script.arguments[2] = connect_command();
        }
        let certificates = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
        if let Some(file) = certificates.filter(|file| file.is_file()) {
            script.mounts.push(BindMount::read_only(file, CERTIFICATES));
            script.env.push(("GIT_SSL_CAINFO".into(), CERTIFICATES.into()));
        }
        Ok(proxy)
    }

    /// Gives a clone the one identity that is meant for its remote, if there is one. Returns its secret.
    fn add_identity(&self, script: &mut GitScript, remote: &GitRemote) -> Result<Option<SecretString>> {
        match &remote.transport {
            GitTransport::Local(_) | GitTransport::Git => Ok(None),
            GitTransport::Ssh => {
                let Some(ssh) = &self.config.ssh else {
                    return Err(Error::unavailable(format!(
                        "source.git: {} needs an ssh key: set ssh_key and known_hosts of [git] in oubliette.toml, or \
                         use an https:// URL",
                        remote.url
                    )));
                };
                for (name, file, inside) in [
                    ("ssh_key", &ssh.key, SSH_KEY),
                    ("known_hosts", &ssh.known_hosts, KNOWN_HOSTS),
                ] {
                    if !file.is_file() {
                        return Err(Error::unavailable(format!(
                            "source.git: {} cannot be cloned: {name} of [git] in oubliette.toml names {}, which is \
                             not a file",
                            remote.url,
                            file.display()
                        )));
                    }
                    script.mounts.push(BindMount::read_only(file, inside));
                }
                let connect = connect_command();
                script.env.extend([
                    ("GIT_SSH_VARIANT".into(), "ssh".into()),
                    (
                        "GIT_SSH_COMMAND".into(),
                        format!(
                            "ssh -F /dev/null -oBatchMode=yes -oConnectTimeout=15 -oStrictHostKeyChecking=yes \
                             -oUserKnownHostsFile={KNOWN_HOSTS} -oGlobalKnownHostsFile=/dev/null \
                             -oUpdateHostKeys=no -oIdentitiesOnly=yes -oIdentityAgent=none -oIdentityFile={SSH_KEY} \
                             -oProxyCommand='{connect} %h %p'"
                        ),
                    ),
                ]);
                Ok(None)
            }
            GitTransport::Http {
                origin,
                host,
                credentials,
            } => {
                let (username, password) = match credentials {
                    Some(UrlCredentials { username, password }) => {
                        (username.expose_secret().to_owned(), password.clone())
                    }
                    None => match self.credential_for(origin, host)? {
                        Some(found) => found,
                        None => return Ok(None),
                    },
                };
                // Only for this scheme, host and port: a redirect elsewhere is not answered with it.
                script
                    .settings
                    .push((format!("credential.{origin}.helper"), CREDENTIAL_HELPER.into()));
                script.env.extend([
                    ("OUBLIETTE_GIT_USERNAME".into(), username.clone()),
                    (
                        "OUBLIETTE_GIT_PASSWORD".into(),
                        password.expose_secret().to_owned(),
                    ),
                ]);
                // A token may stand in either place.
                let secret = if password.expose_secret().is_empty() {
                    username.into()
                } else {
                    password
                };
                Ok(Some(secret).filter(|secret| !secret.expose_secret().is_empty()))
            }
        }
    }

    /// The configured credential for an `https://` host.
    fn credential_for(&self, origin: &str, host: &str) -> Result<Option<(String, SecretString)>> {
        let matching = |credential: &&GitCredential| {
            let given = credential.host.as_str();
            given == host
                || given.strip_suffix(":443") == Some(host)
                || host.strip_suffix(":443") == Some(given)
        };
        let found = self.config.credentials.iter().find(matching);
        // Never over a connection that others can read.
        let Some(found) = found.filter(|_| origin.starts_with("https://")) else {
            return Ok(None);
        };
        match &found.password {
            Some(password) => Ok(Some((found.username.clone(), password.clone()))),
            None => Err(Error::unavailable(format!(
                "source.git: [[git.credential]] of {} in oubliette.toml takes its password from {}, which is not set \
                 in the server's environment",
                found.host, found.password_env
            ))),
        }
    }
}

/// The command that connects stdin and stdout to a host and port, given as further arguments, through the proxy.
fn connect_command() -> String {
    format!("{CLIENT} connect 127.0.0.1:{PROXY_PORT}")
}

/// The egress proxy on a socket for one clone.
struct CloneProxy {
    socket: PathBuf,
    /// The last connection that was refused.
    refusal: Arc<Mutex<Option<EgressRefusal>>>,
    _serving: DropGuard,
}

impl CloneProxy {
    fn serve(git: &GitSandboxes) -> Result<Self> {
        let socket = git
            .sockets_dir
            .join(format!("{SOCKET_PREFIX}{}.sock", uuid::Uuid::new_v4().simple()));
        let listener =
            UntrustedListener::bind(&socket, PassedDescriptors::Refused, DescriptorWorker::default())
                .map_err(Error::internal)?;
        let (driver, path) = (git.driver.clone(), socket.clone());
        let admits = move |peer: &UntrustedSocket| driver.may_connect(&path, peer.as_fd());
        let listener = SandboxListener::new(listener, admits);
        let stop = CancellationToken::new();
        let proxy = Self {
            socket,
            refusal: Arc::default(),
            _serving: stop.clone().drop_guard(),
        };
        let refusal = proxy.refusal.clone();
        let on_refusal: OnRefusal = Arc::new(move |refused| *refusal.lock() = Some(refused.clone()));
        tokio::spawn(git.proxy.clone().serve_with(listener, stop, on_refusal));
        Ok(proxy)
    }
}

impl Drop for CloneProxy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// The error of a clone that failed: what the proxy refused, if anything, else git's own words.
fn clone_error(
    remote: &GitRemote,
    output: &GitOutput,
    stderr: &str,
    refusal: Option<EgressRefusal>,
) -> Error {
    let url = &remote.url;
    let (code, reason) = match refusal {
        Some(refusal) if refusal.code == ErrorCode::NotAllowed.as_str() => {
            (ErrorCode::NotAllowed, refusal.message)
        }
        Some(refusal) => (ErrorCode::Unavailable, refusal.message),
        None => {
            let last = stderr.lines().rfind(|line| line.starts_with("fatal: "));
            let reason = match last.and_then(|line| line.strip_prefix("fatal: ")) {
                Some(line) => line
                    .chars()
                    .filter(|c| !c.is_control())
                    .take(MAX_REASON_CHARS)
                    .collect(),
                None => match output.code() {
                    Some(code) => format!("git ended with exit code {code}"),
                    None => "git was killed".to_owned(),
                },
            };
            (ErrorCode::InvalidArgument, reason)
        }
    };
    Error::new(code, format!("source.git: {url} could not be cloned: {reason}")).with_cause(stderr.trim())
}
