//! The host resources that `[trust]` in `oubliette.toml` allows definitions to use. A definition may ask for
//! host paths, the host's network, running outside the sandbox or a variable of the server's environment, and
//! gets only what `[trust]` lists.

use std::path::{Path, PathBuf};

use oubliette_protocol::{
    CatalogId, Error, Result,
    agent::{AgentDefinition, AgentRuntime, NetworkAccess},
    catalog::{ServerIsolation, StdioTransport, ToolDefinition, Transport},
    id::quoted,
};
use serde::{Deserialize, Serialize};

use crate::Secrets;

/// The server's environment variables, behind a trait so that no code reads the process's own unnoticed.
pub trait ServerEnvironment: Send + Sync {
    /// A variable's value.
    fn var(&self, name: &str) -> Option<String>;
}

/// The environment of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessEnvironment;

impl ServerEnvironment for ProcessEnvironment {
    fn var(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
}

impl ServerEnvironment for std::collections::HashMap<String, String> {
    fn var(&self, name: &str) -> Option<String> {
        self.get(name).cloned()
    }
}

/// `[trust]` as written in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrustTable {
    /// Host paths that definitions may have mounted read-only.
    pub read_only: Vec<PathBuf>,
    /// Catalog entries that may run with `isolation: "host"`.
    pub host_tools: Vec<CatalogId>,
    /// Variables that `${env:NAME}` may read.
    pub env: Vec<String>,
    /// Whether `network: "host"` is allowed; default false.
    pub host_network: bool,
}

impl TrustTable {
    /// Adds the paths that are never allowed: Oubliette's home, and wherever else it keeps its sockets.
    pub fn resolve(self, never: &[&Path]) -> TrustedResources {
        let TrustTable {
            read_only,
            host_tools,
            env,
            host_network,
        } = self;
        TrustedResources {
            read_only,
            host_tools,
            env,
            host_network,
            forbidden: never.iter().map(|path| path.to_path_buf()).collect(),
        }
    }
}

/// The host resources that definitions may use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedResources {
    /// Host paths that definitions may have mounted read-only.
    pub read_only: Vec<PathBuf>,
    /// Catalog entries that may run with `isolation: "host"`.
    pub host_tools: Vec<CatalogId>,
    /// Variables that `${env:NAME}` may read.
    pub env: Vec<String>,
    /// Whether `network: "host"` is allowed; default false.
    pub host_network: bool,
    /// Paths that are never mounted, whatever is listed: Oubliette's home and its sockets.
    pub forbidden: Vec<PathBuf>,
}

/// System paths that are never mounted, whatever is listed.
const ALWAYS_FORBIDDEN: [&str; 3] = ["/proc", "/sys", "/run"];

/// A host path that may be mounted, and where the sandbox sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustedPath {
    /// The real path on the host, symlinks resolved.
    pub host: PathBuf,
    /// The path as the definition gives it, which is where the sandbox sees it.
    pub inside: PathBuf,
}

impl TrustedResources {
    /// Checks a host path that a definition wants mounted read-only.
    ///
    /// Symlinks are resolved first, on both sides, so that a link inside a listed path cannot point out of
    /// it. A path that holds a forbidden one is as forbidden as one beneath it: mounting `/` shows `/proc`.
    pub(crate) fn check_read_only(&self, path: &Path) -> Result<TrustedPath> {
        let shown = quoted(&path.to_string_lossy());
        if !path.is_absolute() {
            return Err(Error::invalid(format!(
                "read_only: {shown} is not an absolute path"
            )));
        }
        let host = path.canonicalize().map_err(|e| {
            Error::permission_denied(format!("read_only: {shown} cannot be resolved on this host"))
                .with_cause(e)
        })?;
        let never = self
            .forbidden
            .iter()
            .map(PathBuf::as_path)
            .chain(ALWAYS_FORBIDDEN.iter().map(Path::new));
        for forbidden in never {
            let real = forbidden
                .canonicalize()
                .unwrap_or_else(|_| forbidden.to_path_buf());
            let touches = |a: &Path| host.starts_with(a) || a.starts_with(&host);
            if touches(&real) || touches(forbidden) {
                return Err(Error::permission_denied(format!(
                    "read_only: {shown} would reach Oubliette's home, /proc, /sys or /run, which are never shown"
                )));
            }
        }
        let listed = self
            .read_only
            .iter()
            .any(|root| root.is_absolute() && root.canonicalize().is_ok_and(|root| host.starts_with(root)));
        match listed {
            true => Ok(TrustedPath {
                host,
                inside: path.to_path_buf(),
            }),
            false => Err(Error::permission_denied(format!(
                "read_only: {shown} is not beneath a path that [trust] read_only in oubliette.toml lists"
            ))),
        }
    }

    /// Checks every path of a list.
    pub fn check_read_only_all<S: AsRef<str>>(&self, paths: &[S]) -> Result<Vec<TrustedPath>> {
        paths
            .iter()
            .map(|path| self.check_read_only(Path::new(path.as_ref())))
            .collect()
    }

    /// Checks that a catalog entry may run on the host.
    pub(crate) fn check_host_tool(&self, id: &CatalogId) -> Result<()> {
        match self.host_tools.contains(id) {
            true => Ok(()),
            false => Err(Error::permission_denied(format!(
                "{id} asks for isolation \"host\", but [trust] host_tools in oubliette.toml does not list it"
            ))),
        }
    }

    /// Checks that a sandbox may have this network.
    pub fn check_network(&self, network: NetworkAccess) -> Result<()> {
        match network {
            NetworkAccess::None | NetworkAccess::Proxy => Ok(()),
            NetworkAccess::Host if self.host_network => Ok(()),
            NetworkAccess::Host => Err(Error::permission_denied(
                "network \"host\" is closed: [trust] host_network in oubliette.toml is false",
            )),
        }
    }

    /// Checks that every `${env:NAME}` of a text may be read.
    pub(crate) fn check_env_references(&self, text: &str) -> Result<()> {
        split_references(text).try_for_each(|piece| match piece? {
            TextPiece::Plain(_) => Ok(()),
            TextPiece::Variable(name) => self.check_env_name(name),
        })
    }

    fn check_env_name(&self, name: &str) -> Result<()> {
        match self.env.iter().any(|listed| listed == name) {
            true => Ok(()),
            false => Err(Error::permission_denied(format!(
                "${{env:{name}}} cannot be read: [trust] env in oubliette.toml does not list {name}"
            ))),
        }
    }

    /// Replaces every `${env:NAME}` in `text` by the variable's value, which is added to `secrets`.
    pub fn expand(&self, text: &str, env: &dyn ServerEnvironment, secrets: &Secrets) -> Result<String> {
        let mut out = String::with_capacity(text.len());
        for piece in split_references(text) {
            match piece? {
                TextPiece::Plain(plain) => out.push_str(plain),
                TextPiece::Variable(name) => {
                    self.check_env_name(name)?;
                    let value = env.var(name).ok_or_else(|| {
                        Error::unavailable(format!("{name} is not set in the server's environment"))
                    })?;
                    secrets.add(&value);
                    out.push_str(&value);
                }
            }
        }
        Ok(out)
    }

    /// Checks everything that an agent asks of the host. Whether its variables are set is checked when it starts.
    pub fn check_agent(&self, agent: &AgentDefinition) -> Result<()> {
        self.check_network(agent.sandbox.network)?;
        for value in agent.env.values() {
            self.check_env_references(value)?;
        }
        match &agent.runtime {
            AgentRuntime::Builtin {} => Ok(()),
            AgentRuntime::Acp {
                command: _,
                program: _,
                args: _,
                env,
                read_only,
                mcp_transport: _,
            } => {
                env.values()
                    .try_for_each(|value| self.check_env_references(value))?;
                self.check_read_only_all(read_only).map(drop)
            }
        }
    }

    /// Checks everything that a catalog entry asks of the host.
    pub fn check_tool(&self, tool: &ToolDefinition) -> Result<()> {
        let checked = match tool {
            ToolDefinition::Builtin(_) => Ok(()),
            ToolDefinition::Mcp(server) => match &server.transport {
                Transport::Stdio(stdio) => self.check_stdio(&server.id, stdio),
                Transport::Ws { headers, .. } | Transport::Http { headers, .. } => headers
                    .values()
                    .try_for_each(|value| self.check_env_references(value)),
                Transport::Tcp { .. } => Ok(()),
            },
        };
        checked.map_err(|e| {
            let message = format!("catalog entry {}: {}", tool.id(), e.message);
            e.with_message(message)
        })
    }

    fn check_stdio(&self, id: &CatalogId, stdio: &StdioTransport) -> Result<()> {
        if stdio.isolation == ServerIsolation::Host {
            self.check_host_tool(id)?;
        }
        self.check_network(stdio.network)?;
        self.check_read_only_all(&stdio.read_only)?;
        stdio
            .env
            .values()
            .chain(&stdio.args)
            .try_for_each(|text| self.check_env_references(text))
    }

    /// Adds every value that a catalog entry reads from the environment to `secrets`.
    pub(crate) fn gather_secrets(
        &self,
        tool: &ToolDefinition,
        env: &dyn ServerEnvironment,
        secrets: &Secrets,
    ) {
        let ToolDefinition::Mcp(server) = tool else { return };
        let texts: Vec<&String> = match &server.transport {
            Transport::Stdio(stdio) => stdio.env.values().chain(&stdio.args).collect(),
            Transport::Ws { headers, .. } | Transport::Http { headers, .. } => headers.values().collect(),
            Transport::Tcp { .. } => Vec::new(),
        };
        for text in texts {
            // A text that cannot be expanded yields no secret; starting the server reports the error.
            let _ = self.expand(text, env, secrets);
        }
    }
}

/// A literal part of a text, or a `${env:NAME}` reference in it.
enum TextPiece<'a> {
    Plain(&'a str),
    Variable(&'a str),
}

/// Splits a text at its `${env:NAME}` references. `$` is literal unless `{env:` follows.
fn split_references(text: &str) -> impl Iterator<Item = Result<TextPiece<'_>>> {
    const OPEN: &str = "${env:";
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        match rest.find(OPEN) {
            Some(0) => {
                let Some(end) = rest.find('}') else {
                    rest = "";
                    return Some(Err(Error::invalid("${env: has no closing }")));
                };
                let name = &rest[OPEN.len()..end];
                rest = &rest[end + 1..];
                Some(match oubliette_protocol::agent::check_env_name(name) {
                    Ok(()) => Ok(TextPiece::Variable(name)),
                    Err(why) => Err(Error::invalid(format!(
                        "${{env:…}}: {} is no name: {why}",
                        quoted(name)
                    ))),
                })
            }
            at => {
                let (plain, after) = rest.split_at(at.unwrap_or(rest.len()));
                rest = after;
                Some(Ok(TextPiece::Plain(plain)))
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use oubliette_protocol::ErrorCode;
    use proptest::prelude::*;
    use std::collections::HashMap;
    use std::os::unix::fs::symlink;

    fn trusting(read_only: &[&Path], never: &Path) -> TrustedResources {
        TrustedResources {
            read_only: read_only.iter().map(|p| p.to_path_buf()).collect(),
            forbidden: vec![never.to_path_buf()],
            ..TrustedResources::default()
        }
    }

    #[test]
    fn sockets_outside_the_home_are_as_closed_as_the_home() {
        let dir = tempfile::tempdir().unwrap();
        let (home, sockets) = (dir.path().join("home"), dir.path().join("run/oubliette-1"));
        std::fs::create_dir_all(&sockets).unwrap();
        let table = TrustTable {
            read_only: vec![dir.path().to_path_buf()],
            ..TrustTable::default()
        };
        let trust = table.resolve(&[&home, &sockets]);
        for path in [&sockets, &dir.path().join("run"), &sockets.join("..")] {
            let refused = trust.check_read_only(path).unwrap_err();
            assert_eq!(refused.code, ErrorCode::PermissionDenied);
        }
    }

    #[test]
    fn a_path_must_be_beneath_a_listed_one_with_symlinks_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        for d in ["opt/agents/bin", "opt/agents-evil", "secret", "home/agents"] {
            std::fs::create_dir_all(at(d)).unwrap();
        }
        symlink(at("secret"), at("opt/agents/out")).unwrap();
        symlink(at("opt/agents"), at("link")).unwrap();
        symlink("/proc", at("opt/agents/p")).unwrap();
        let trust = trusting(
            &[&at("opt/agents"), &at("home"), Path::new("relative")],
            &at("home"),
        );

        let good = trust.check_read_only(&at("link/bin")).unwrap();
        assert_eq!(
            (good.host, good.inside),
            (at("opt/agents/bin").canonicalize().unwrap(), at("link/bin"))
        );
        assert!(trust.check_read_only(&at("opt/agents")).is_ok());
        for bad in [
            "opt/agents-evil",
            "opt",
            "secret",
            "opt/agents/out",
            "opt/agents/p",
            "home",
            "home/agents",
            "none",
        ] {
            let error = trust.check_read_only(&at(bad)).unwrap_err();
            assert_eq!(error.code, ErrorCode::PermissionDenied, "{bad}");
        }
    }

    #[test]
    fn listing_the_root_opens_neither_home_nor_proc_nor_what_holds_them() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("a/home")).unwrap();
        let trust = trusting(&[Path::new("/")], &dir.path().join("a/home"));
        for bad in ["/", "/proc", "/proc/self", "/sys/kernel", "/run"] {
            assert!(trust.check_read_only(Path::new(bad)).is_err(), "{bad}");
        }
        assert!(trust.check_read_only(dir.path()).is_err(), "it holds the home");
        assert!(trust.check_read_only(Path::new("/usr")).is_ok());
    }

    #[test]
    fn variables_are_read_only_when_listed_and_kept_secret() {
        let trust = TrustedResources {
            env: vec!["TOKEN".into(), "UNSET".into()],
            ..TrustedResources::default()
        };
        let env = HashMap::from([("TOKEN".into(), "hunter22".into()), ("OTHER".into(), "x".into())]);
        let secrets = Secrets::new();
        assert_eq!(
            trust.expand("Bearer ${env:TOKEN}$ ${x}", &env, &secrets).unwrap(),
            "Bearer hunter22$ ${x}"
        );
        assert_eq!(
            secrets.mask_text("got hunter22"),
            format!("got {}", crate::secret::MASK)
        );
        assert_eq!(
            trust.expand("${env:OTHER}", &env, &secrets).unwrap_err().code,
            ErrorCode::PermissionDenied
        );
        assert_eq!(
            trust.expand("${env:UNSET}", &env, &secrets).unwrap_err().code,
            ErrorCode::Unavailable
        );
        assert!(trust.expand("${env:TOKEN", &env, &secrets).is_err());
        assert!(trust.expand("${env:}", &env, &secrets).is_err());
    }

    #[test]
    fn every_host_resource_of_a_definition_is_checked() {
        let tool = |extra: &str| {
            ToolDefinition::parse(&format!(
                r#"{{"id":"t","kind":"mcp","transport":"stdio","command":"x"{extra}}}"#
            ))
            .unwrap()
        };
        let none = TrustedResources::default();
        assert!(none.check_tool(&tool("")).is_ok());
        for asks in [
            r#","isolation":"host""#,
            r#","network":"host""#,
            r#","read_only":["/usr"]"#,
            r#","env":{"A":"${env:B}"}"#,
            r#","args":["${env:B}"]"#,
        ] {
            let error = none.check_tool(&tool(asks)).unwrap_err();
            assert_eq!(error.code, ErrorCode::PermissionDenied, "{asks}");
            assert!(error.message.contains("entry t:"), "{}", error.message);
        }
        let all = TrustedResources {
            read_only: vec!["/usr".into()],
            host_tools: vec!["t".parse().unwrap()],
            env: vec!["B".into()],
            host_network: true,
            forbidden: Vec::new(),
        };
        let asks = r#","isolation":"host","network":"host","read_only":["/usr/bin"],"env":{"A":"${env:B}"}"#;
        assert!(all.check_tool(&tool(asks)).is_ok());
    }

    proptest! {
        #[test]
        fn text_without_references_stays(text in "[^$]{0,60}") {
            let out = TrustedResources::default().expand(&text, &HashMap::new(), &Secrets::new()).unwrap();
            prop_assert_eq!(out, text);
        }

        #[test]
        fn no_text_panics(text in ".{0,60}") {
            let _ = TrustedResources::default().expand(&text, &HashMap::new(), &Secrets::new());
        }
    }
}
