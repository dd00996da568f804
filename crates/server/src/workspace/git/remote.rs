//! The git URL and ref a workspace is cloned from, checked.

use std::path::PathBuf;

use oubliette_protocol::{Error, Result, id::quoted};

use crate::config::TrustConfig;

/// A checked git URL and ref to clone.
#[derive(Debug, Clone)]
pub(crate) struct GitRemote {
    pub(super) url: String,
    pub(super) reference: Option<String>,
    pub(super) local: bool,
}

impl GitRemote {
    /// Checks URL and ref. A path on this machine is accepted only beneath a path of `[trust] read_only`.
    pub(crate) fn check(url: &str, reference: Option<&str>, trust: &TrustConfig) -> Result<Self> {
        let bad = |why: &str| Error::invalid(format!("source.git: {} {why}", quoted(&without_password(url))));
        if url.len() > 2000
            || url.chars().any(|c| c.is_control() || c.is_whitespace())
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
            let real = std::fs::canonicalize(path).ok();
            let listed = |real: &PathBuf| {
                trust
                    .read_only
                    .iter()
                    .filter_map(|p| std::fs::canonicalize(p).ok())
                    .any(|p| real.starts_with(p))
            };
            return match real.filter(listed) {
                Some(real) => Ok(Self {
                    url: real.to_string_lossy().into_owned(),
                    reference,
                    local: true,
                }),
                None => Err(bad(
                    "is on this machine, and [trust] read_only in oubliette.toml does not list it",
                )),
            };
        }
        let rest = ["https://", "http://", "ssh://", "git://"]
            .iter()
            .find_map(|s| url.strip_prefix(s));
        match rest {
            // ssh would take a host that begins with a dash as an option.
            Some(rest) if !rest.is_empty() && !rest.starts_with(['-', '/']) && !rest.contains("@-") => {
                Ok(Self {
                    url: url.to_owned(),
                    reference,
                    local: false,
                })
            }
            _ => Err(bad("must be an https://, http://, ssh:// or git:// URL")),
        }
    }
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

/// A URL without its password, to be stored and shown.
pub(crate) fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let (authority, path) = rest.split_once('/').map_or((rest, ""), |(a, p)| (a, p));
    match authority.rsplit_once('@') {
        Some((user, host)) => {
            let user = user.split(':').next().unwrap_or_default();
            format!("{scheme}://{user}@{host}/{path}")
        }
        None => url.to_owned(),
    }
}
