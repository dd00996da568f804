//! `[git]`: how workspaces are cloned and compared.

use std::{path::PathBuf, time::Duration};

use oubliette_protocol::{Result, agent::check_env_name, duration::HumanDuration};
use secrecy::SecretString;

use super::{
    EnvLookup, duration_or, field_error,
    raw::{RawGit, RawGitCredential},
};

/// `[git]`: how workspaces are cloned and compared. The identities in it are the only ones git has.
#[derive(Debug, Clone)]
pub struct GitConfig {
    /// The identity for `ssh://` URLs; none: they are refused.
    pub ssh: Option<SshIdentity>,
    /// The identities for `https://` URLs.
    pub credentials: Vec<GitCredential>,
    /// How long a clone may take.
    pub clone_timeout: Duration,
    /// How long a diff may take.
    pub diff_timeout: Duration,
}

/// `[git] ssh_key` and `known_hosts`.
#[derive(Debug, Clone)]
pub struct SshIdentity {
    /// File with the private key.
    pub key: PathBuf,
    /// File with the host keys that remotes must have.
    pub known_hosts: PathBuf,
}

/// `[[git.credential]]`: user name and password for the `https://` URLs of one host.
#[derive(Debug, Clone)]
pub struct GitCredential {
    /// Host, or `host:port`, in lower case.
    pub host: String,
    /// The user name.
    pub username: String,
    /// The password or token; none: the variable is not set.
    pub password: Option<SecretString>,
    /// The variable it comes from.
    pub password_env: String,
}

pub(super) fn resolve(raw: RawGit, env: EnvLookup<'_>) -> Result<GitConfig> {
    let ssh = match (raw.ssh_key, raw.known_hosts) {
        (Some(key), Some(known_hosts)) => Some(SshIdentity { key, known_hosts }),
        (None, None) => None,
        _ => {
            return Err(field_error(
                "git.ssh_key",
                "ssh_key and known_hosts come together",
            ));
        }
    };
    for path in ssh.iter().flat_map(|ssh| [&ssh.key, &ssh.known_hosts]) {
        if !path.is_absolute() {
            return Err(field_error(
                "git.ssh_key",
                format!("{} is not an absolute path", path.display()),
            ));
        }
    }
    let timeout = |field: &str, given: Option<HumanDuration>, default_ms: u64| {
        let timeout = duration_or(given, default_ms);
        let bounds = Duration::from_secs(1)..=Duration::from_secs(24 * 3600);
        match bounds.contains(&timeout) {
            true => Ok(timeout),
            false => Err(field_error(field, "must be between 1s and 1d")),
        }
    };
    let credential = |raw: RawGitCredential| {
        let host = raw.host.to_ascii_lowercase();
        if !crate::workspace::git::remote::is_host(&host) {
            let why = format!("{:?} is not a host or host:port", raw.host);
            return Err(field_error("git.credential.host", why));
        }
        let control = |text: &str| text.chars().any(char::is_control);
        if raw.username.is_empty() || control(&raw.username) {
            let why = "must not be empty or hold control characters";
            return Err(field_error("git.credential.username", why));
        }
        check_env_name(&raw.password_env).map_err(|why| {
            field_error(
                "git.credential.password_env",
                format!("{:?}: {why}", raw.password_env),
            )
        })?;
        let password = env(&raw.password_env).filter(|password| !password.is_empty());
        if password.as_deref().is_some_and(control) {
            let why = format!("the value of {} holds control characters", raw.password_env);
            return Err(field_error("git.credential.password_env", why));
        }
        Ok(GitCredential {
            host,
            username: raw.username,
            password: password.map(SecretString::from),
            password_env: raw.password_env,
        })
    };
    Ok(GitConfig {
        clone_timeout: timeout("git.clone_timeout", raw.clone_timeout, 300_000)?,
        diff_timeout: timeout("git.diff_timeout", raw.diff_timeout, 60_000)?,
        credentials: raw
            .credential
            .into_iter()
            .map(credential)
            .collect::<Result<_>>()?,
        ssh,
    })
}

#[cfg(test)]
mod tests {
    use super::super::ServerConfig;

    fn parse(text: &str) -> oubliette_protocol::Result<ServerConfig> {
        ServerConfig::parse(text, "oubliette.toml", &|name| {
            (name == "KEY").then(|| "secret".into())
        })
    }

    #[test]
    fn wrong_git_settings_are_refused_by_name() {
        for (text, named) in [
            ("[git]\nssh_key = \"/k\"", "known_hosts"),
            ("[git]\nssh_key = \"k\"\nknown_hosts = \"/h\"", "git.ssh_key"),
            ("[git]\ndiff_timeout = \"0s\"", "git.diff_timeout"),
            ("[git]\nclone_timeout = \"2d\"", "git.clone_timeout"),
            (
                "[[git.credential]]\nhost = \"h/x\"\nusername = \"u\"\npassword_env = \"P\"",
                "git.credential.host",
            ),
            (
                "[[git.credential]]\nhost = \"h\"\nusername = \"\"\npassword_env = \"P\"",
                "git.credential.username",
            ),
            (
                "[[git.credential]]\nhost = \"h\"\nusername = \"u\"\npassword_env = \"-\"",
                "git.credential.password_env",
            ),
            (
                "[[git.credential]]\nhost = \"h\"\nusername = \"u\"",
                "password_env",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.message.contains(named), "{text}: {}", error.message);
        }
    }

    #[test]
    fn a_git_password_comes_from_the_environment_and_is_not_printed() {
        let text = "[[git.credential]]\nhost = \"H:8443\"\nusername = \"u\"\npassword_env = \"KEY\"";
        let config = parse(text).unwrap();
        assert_eq!(config.git.credentials[0].host, "h:8443");
        assert!(config.git.credentials[0].password.is_some());
        assert!(!format!("{config:?}").contains("secret"));
    }
}
