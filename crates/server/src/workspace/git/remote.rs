//! The git URL and ref a workspace is cloned from, checked.

use std::path::PathBuf;

use oubliette_protocol::{Error, Result, id::quoted};
use oubliette_tools::without_url_credentials;
use secrecy::SecretString;

use crate::config::TrustConfig;

/// A checked git URL and ref to clone.
#[derive(Debug, Clone)]
pub struct GitRemote {
    /// The URL without credentials.
    pub(super) url: String,
    pub(super) reference: Option<String>,
    pub(super) transport: GitTransport,
}

/// How a remote is reached.
#[derive(Debug, Clone)]
pub(super) enum GitTransport {
    /// A repository on this machine, mounted read-only.
    Local(PathBuf),
    /// `https://` or `http://`.
    Http {
        /// Scheme, host and port: the prefix of the URL that credentials belong to, without the slash after it.
        origin: String,
        /// Host and, if the URL has one, port, in lower case.
        host: String,
        /// The credentials that the URL held.
        credentials: Option<UrlCredentials>,
    },
    /// `ssh://`.
    Ssh,
    /// `git://`.
    Git,
}

/// User name and password of a clone URL, decoded.
#[derive(Debug, Clone)]
pub(super) struct UrlCredentials {
    pub(super) username: SecretString,
    pub(super) password: SecretString,
}

impl GitRemote {
    /// Checks URL and ref. A path on this machine is accepted only beneath a path of `[trust] read_only`.
    pub fn check(url: &str, reference: Option<&str>, trust: &TrustConfig) -> Result<Self> {
        let bad = |why: &str| {
            Error::invalid(format!(
                "source.git: {} {why}",
                quoted(&without_url_credentials(url))
            ))
        };
        if url.len() > 2000
            || url
                .chars()
                .any(|c| c.is_control() || c.is_whitespace() || c == '\\')
            || url.starts_with('-')
        {
            return Err(bad("is not a URL"));
        }
        if let Some(reference) = reference {
            check_ref(reference)?;
        }
        let reference = reference.map(str::to_owned);
        let path = url
            .strip_prefix("file://")
            .or_else(|| url.starts_with('/').then_some(url));
        if let Some(path) = path {
            return match trusted_path(path, trust) {
                Some(real) => Ok(Self {
                    url: real.to_string_lossy().into_owned(),
                    reference,
                    transport: GitTransport::Local(real),
                }),
                None => Err(bad(
                    "is on this machine, and [trust] read_only in oubliette.toml does not list it",
                )),
            };
        }
        let parts = UrlParts::parse(url).ok_or_else(|| {
            bad(
                "must be an https://, http://, ssh:// or git:// URL with a host; special characters of a user \
                 name or password are written as %XX",
            )
        })?;
        let origin = format!("{}://{}", parts.scheme, parts.host);
        let (url, transport) = match parts.scheme {
            "ssh" => {
                // The user name is part of the address here, and no secret; ssh takes no password.
                let user = parts.user_info.map_or("", |info| before_colon(info).0);
                let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
                if user.starts_with('-') || !user.bytes().all(plain) {
                    return Err(bad("has a user name that ssh does not take"));
                }
                let at = if user.is_empty() { "" } else { "@" };
                (
                    format!("ssh://{user}{at}{}{}", parts.host, parts.path),
                    GitTransport::Ssh,
                )
            }
            "git" => (format!("{origin}{}", parts.path), GitTransport::Git),
            _ => {
                let credentials = match parts.user_info {
                    Some(info) => Some(UrlCredentials::decode(info).ok_or_else(|| {
                        bad("has a user name or password with an invalid %XX or a control character")
                    })?),
                    None => None,
                };
                (
                    format!("{origin}{}", parts.path),
                    GitTransport::Http {
                        host: parts.host.to_ascii_lowercase(),
                        origin,
                        credentials,
                    },
                )
            }
        };
        Ok(Self {
            url,
            reference,
            transport,
        })
    }

    /// Branch, tag or commit to check out.
    pub fn reference(&self) -> Option<&str> {
        self.reference.as_deref()
    }

    /// The URL as it is stored and shown: without credentials.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// The real path, if it is beneath one of `[trust] read_only`.
fn trusted_path(path: &str, trust: &TrustConfig) -> Option<PathBuf> {
    let real = std::fs::canonicalize(path).ok()?;
    trust
        .read_only
        .iter()
        .filter_map(|trusted| std::fs::canonicalize(trusted).ok())
        .any(|trusted| real.starts_with(trusted))
        .then_some(real)
}

/// A URL in its parts. Anything that git, curl and ssh might read in different ways is not one.
struct UrlParts<'a> {
    scheme: &'a str,
    user_info: Option<&'a str>,
    /// Host and optional port.
    host: &'a str,
    /// The rest, empty or beginning with a slash.
    path: &'a str,
}

impl<'a> UrlParts<'a> {
    fn parse(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        if !["https", "http", "ssh", "git"].contains(&scheme) {
            return None;
        }
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if !(path.is_empty() || path.starts_with('/')) {
            return None;
        }
        let (user_info, host) = match authority.split_once('@') {
            Some((info, host)) => (Some(info), host),
            None => (None, authority),
        };
        is_host(host).then_some(Self {
            scheme,
            user_info,
            host,
            path,
        })
    }
}

/// Whether this is a host name or address, with or without a port. It does not begin with a dash, which ssh would
/// take as an option.
pub(crate) fn is_host(text: &str) -> bool {
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) if address.parse::<std::net::Ipv6Addr>().is_ok() => ("v6", port),
            _ => return false,
        },
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let named = !name.is_empty()
        && name.len() <= 253
        && !name.starts_with(['-', '.'])
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    named
        && match port.strip_prefix(':') {
            None => port.is_empty(),
            Some(port) => port.parse::<u16>().is_ok_and(|port| port != 0),
        }
}

fn before_colon(info: &str) -> (&str, &str) {
    info.split_once(':').unwrap_or((info, ""))
}

impl UrlCredentials {
    fn decode(info: &str) -> Option<Self> {
        let (username, password) = before_colon(info);
        Some(Self {
            username: percent_decode(username)?.into(),
            password: percent_decode(password)?.into(),
        })
    }
}

/// Decodes `%XX`. `None` for an invalid escape, or where a control character would come out, which would end a line
/// of git's credential protocol.
fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let (high, low) = (rest.next()?, rest.next()?);
                let digit = |b: u8| char::from(b).to_digit(16);
                u8::try_from(digit(high)? * 16 + digit(low)?).ok()?
            }
            other => other,
        });
    }
    let text = String::from_utf8(bytes).ok()?;
    (!text.chars().any(char::is_control)).then_some(text)
}

fn check_ref(reference: &str) -> Result<()> {
    let plain = !reference.is_empty()
        && reference.len() <= 250
        && !reference.starts_with(['-', '/', '.'])
        && !reference.contains("..")
        && !reference.contains("@{")
        && reference
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"/._-+@".contains(&b));
    match plain {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "source.ref: {} is not a branch, tag or commit",
            quoted(reference)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;

    use super::*;

    #[test]
    fn urls_and_refs_are_checked() {
        let trust = TrustConfig::default();
        for good in [
            "https://h/x.git",
            "http://u:p@h/x",
            "https://h:8443",
            "https://[2001:db8::1]:8443/x",
            "ssh://git@h/x",
            "ssh://h:2222/x",
            "git://h/x",
        ] {
            assert!(GitRemote::check(good, None, &trust).is_ok(), "{good}");
        }
        for bad in [
            "",
            "ext::sh -c id",
            "--upload-pack=x",
            "file:///etc",
            "/etc",
            "https://",
            "https:///x",
            "https://u@/x",
            "https://h:0/x",
            "https://h:x/y",
            "https://h?x",
            "https://u:p@evil@h/x",
            "https://u:%0a@h/x",
            "https://u:%zz@h/x",
            "https://h\\@evil/x",
            "ssh://-oProxyCommand=x/y",
            "ssh://u@-oProxyCommand=x/y",
            "ssh://-l@h/y",
            "ssh://a$b@h/y",
            "h:x",
            "https://a b/",
        ] {
            assert!(GitRemote::check(bad, None, &trust).is_err(), "{bad}");
        }
        for bad in ["", "-x", "--orphan", "a..b", "a b", "HEAD@{1}", "../x"] {
            assert!(
                GitRemote::check("https://h/x", Some(bad), &trust).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn credentials_are_taken_out_of_a_url() {
        let remote = GitRemote::check(
            "https://us%65r:t%40ken@H:8443/x.git",
            None,
            &TrustConfig::default(),
        )
        .unwrap();
        assert_eq!(remote.url(), "https://H:8443/x.git");
        assert!(!format!("{remote:?}").contains("ken"));
        let GitTransport::Http {
            origin,
            host,
            credentials: Some(credentials),
        } = remote.transport
        else {
            panic!("no credentials")
        };
        assert_eq!((origin.as_str(), host.as_str()), ("https://H:8443", "h:8443"));
        assert_eq!(credentials.username.expose_secret(), "user");
        assert_eq!(credentials.password.expose_secret(), "t@ken");
        // A token stands in the place of the user name, too.
        let remote = GitRemote::check("https://token@h/x", None, &TrustConfig::default()).unwrap();
        assert_eq!(remote.url(), "https://h/x");
        let remote = GitRemote::check("ssh://git:secret@h/x", None, &TrustConfig::default()).unwrap();
        assert_eq!(remote.url(), "ssh://git@h/x");
        let refused = GitRemote::check("https://u:secret@h a/x", None, &TrustConfig::default()).unwrap_err();
        assert!(!refused.message.contains("secret"), "{}", refused.message);
    }
}
