//! The servers a user has logged in to: names, URLs and tokens, in a file of the home directory that only its owner
//! can read.

use std::path::PathBuf;

use oubliette_home::{HomeDir, safe_fs};
use oubliette_protocol::{Error, Result, id::quoted};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};

/// The name that stands for this machine's home directory instead of a server elsewhere.
pub(crate) const LOCAL: &str = "local";
/// Maximum number of contexts.
const MAX_CONTEXTS: usize = 100;
/// Maximum length of a context's name, in bytes.
const MAX_NAME_BYTES: usize = 100;

/// A server somebody has logged in to.
#[derive(Debug, Clone)]
pub(crate) struct ServerContext {
    /// Its name.
    pub(crate) name: String,
    /// The server's base URL.
    pub(crate) url: String,
    /// The token to send to it.
    pub(crate) token: SecretString,
}

/// All contexts, and which of them commands use.
#[derive(Debug, Default)]
pub(crate) struct ContextFile {
    path: PathBuf,
    /// The contexts, by name.
    pub(crate) contexts: Vec<ServerContext>,
    /// The context commands use; none: this machine's home directory.
    pub(crate) current: Option<String>,
}

/// The file as it is written.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawContexts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    current: Option<String>,
    #[serde(default)]
    contexts: Vec<RawContext>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawContext {
    name: String,
    url: String,
    token: String,
}

impl ContextFile {
    /// Reads the file of a home; a missing one holds no context.
    pub(crate) fn load(home: &HomeDir) -> Result<Self> {
        let path = home.root().join("contexts.json");
        let raw: RawContexts = match std::fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).map_err(|error| {
                Error::invalid(format!(
                    "{}: {error}; correct it, or delete it and log in again",
                    path.display()
                ))
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => RawContexts::default(),
            Err(error) => {
                let why = format!("{}: cannot be read: {error}", path.display());
                return Err(Error::invalid(why));
            }
        };
        let context = |raw: RawContext| ServerContext {
            name: raw.name,
            url: raw.url,
            token: raw.token.into(),
        };
        Ok(Self {
            path,
            contexts: raw.contexts.into_iter().map(context).collect(),
            current: raw.current,
        })
    }

    /// Writes the file, readable by its owner only.
    pub(crate) fn save(&self, home: &HomeDir) -> Result<()> {
        let context = |context: &ServerContext| RawContext {
            name: context.name.clone(),
            url: context.url.clone(),
            token: context.token.expose_secret().to_owned(),
        };
        let raw = RawContexts {
            current: self.current.clone(),
            contexts: self.contexts.iter().map(context).collect(),
        };
        safe_fs::create_private_dir(home.root())?;
        let text = serde_json::to_vec_pretty(&raw).map_err(Error::internal)?;
        safe_fs::write_atomic(&self.path, &text, 0o600)
    }

    /// The context with this name.
    pub(crate) fn get(&self, name: &str) -> Result<&ServerContext> {
        self.contexts
            .iter()
            .find(|context| context.name == name)
            .ok_or_else(|| {
                Error::not_found(format!(
                    "there is no context {}; `oubliette context` lists them, `oubliette login URL` adds one",
                    quoted(name)
                ))
            })
    }

    /// The context of the server with this URL.
    pub(crate) fn by_url(&self, url: &str) -> Option<&ServerContext> {
        self.contexts.iter().find(|context| context.url == url)
    }

    /// Adds a context, or replaces the one with its name, and makes commands use it.
    pub(crate) fn add(&mut self, context: ServerContext) -> Result<()> {
        check_name(&context.name)?;
        self.current = Some(context.name.clone());
        if let Some(before) = self.contexts.iter_mut().find(|known| known.name == context.name) {
            *before = context;
            return Ok(());
        }
        if self.contexts.len() >= MAX_CONTEXTS {
            return Err(Error::limit_exceeded(format!(
                "there are {MAX_CONTEXTS} contexts already; remove one with `oubliette context remove NAME`"
            )));
        }
        self.contexts.push(context);
        Ok(())
    }

    /// Removes a context. Commands that used it use this machine's home directory again.
    pub(crate) fn remove(&mut self, name: &str) -> Result<()> {
        self.get(name)?;
        self.contexts.retain(|context| context.name != name);
        self.current.take_if(|current| current == name);
        Ok(())
    }

    /// Makes commands use a context; [`LOCAL`] is this machine's home directory.
    pub(crate) fn select(&mut self, name: &str) -> Result<()> {
        self.current = match name {
            LOCAL => None,
            name => Some(self.get(name)?.name.clone()),
        };
        Ok(())
    }
}

/// Checks a context's name.
fn check_name(name: &str) -> Result<()> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.:[]".contains(&b);
    match (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(allowed) && name != LOCAL {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{} cannot be the name of a context: use 1 to {MAX_NAME_BYTES} letters, digits, '-', '_', '.', ':', and not \
             {LOCAL}, which is this machine's home directory",
            quoted(name)
        ))),
    }
}

/// Checks a server's URL and brings it into one form: `scheme://host[:port][/path]`, without a slash at the end.
pub(crate) fn check_server_url(text: &str) -> Result<String> {
    let bad = |why: &str| {
        Error::invalid(format!(
            "{} {why}; a server's URL is like https://oubliette.example.com or http://127.0.0.1:8080",
            quoted(text)
        ))
    };
    let url = reqwest::Url::parse(text).map_err(|_| bad("is no URL"))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(bad("is not an http:// or https:// URL"));
    }
    if !url.username().is_empty()
        || url.password().is_some()
        || url.query().is_some()
        || url.fragment().is_some()
    {
        return Err(bad("has more than a host and a path"));
    }
    let plain = url.as_str().trim_end_matches('/');
    // The address of its MCP endpoint is what people have at hand.
    Ok(plain.strip_suffix("/mcp").unwrap_or(plain).to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn context(name: &str) -> ServerContext {
        ServerContext {
            name: name.into(),
            url: format!("https://{name}"),
            token: "oub_secret".to_owned().into(),
        }
    }

    #[test]
    fn contexts_are_kept_in_a_file_only_its_owner_can_read() {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path().join("h")).unwrap();
        let mut file = ContextFile::load(&home).unwrap();
        assert!(file.contexts.is_empty() && file.current.is_none());
        for name in ["a.example", "b:8080"] {
            file.add(context(name)).unwrap();
        }
        file.save(&home).unwrap();
        let mode = std::fs::metadata(&file.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut read = ContextFile::load(&home).unwrap();
        assert_eq!(read.current.as_deref(), Some("b:8080"));
        assert_eq!(
            read.by_url("https://a.example").unwrap().token.expose_secret(),
            "oub_secret"
        );
        assert!(!format!("{read:?}").contains("secret"));
        read.select("a.example").unwrap();
        read.remove("a.example").unwrap();
        assert!(read.current.is_none() && read.select("a.example").is_err());
        read.select("b:8080").unwrap();
        read.select(LOCAL).unwrap();
        assert!(read.current.is_none());
        for bad in ["", "a b", LOCAL, "ä"] {
            assert!(read.add(context(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_servers_url_has_one_form() {
        for (given, expected) in [
            ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
            ("https://EXAMPLE.com/mcp", "https://example.com"),
            ("https://example.com/oub/", "https://example.com/oub"),
        ] {
            assert_eq!(check_server_url(given).unwrap(), expected);
        }
        for bad in [
            "",
            "example.com",
            "ftp://example.com",
            "https://user@example.com",
            "https://e.com/?a",
        ] {
            assert!(check_server_url(bad).is_err(), "{bad}");
        }
    }
}
