//! The package registries of the operator: what npm's and pip's own configuration files and variables name.
//!
//! An installation reaches these hosts and no others, on whatever address they have. Credentials are given only to
//! steps that run nothing of a package, and are masked in whatever is reported.

mod npm_config;
mod pip_config;

use std::{collections::BTreeSet, path::PathBuf};

pub(crate) use npm_config::NpmConfig;
pub(crate) use pip_config::PipConfig;
use url::Url;

/// Maximum size of a configuration file, in bytes.
const MAX_CONFIG_BYTES: u64 = 256 * 1024;

/// The server's environment variables.
pub(crate) type EnvironmentVariables = dyn Fn(&str) -> Option<String> + Send + Sync;

/// Whether a step of an installation gets the registries' credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CredentialAccess {
    /// It runs nothing of a package.
    Given,
    /// It may run what a package brings.
    Withheld,
}

/// Hosts with ports, in the form of `[egress] allow`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RegistryHosts(BTreeSet<String>);

impl RegistryHosts {
    fn add_url(&mut self, url: &Url) {
        if let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) {
            self.0.insert(format!("{host}:{port}"));
        }
    }

    fn add_entry(&mut self, entry: String) {
        self.0.insert(entry);
    }

    pub(crate) fn entries(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }
}

impl std::fmt::Display for RegistryHosts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.0.iter().map(String::as_str).collect();
        f.write_str(&names.join(", "))
    }
}

/// A file with certificates that the operator's configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CertificateFile {
    /// Its path on the host.
    pub(crate) path: PathBuf,
    /// The variable by which the package manager finds it.
    pub(crate) variable: &'static str,
}

impl CertificateFile {
    /// Those of these variables that are set.
    fn from_variables(names: &[&'static str], env: &EnvironmentVariables) -> Vec<Self> {
        let file = |variable: &&'static str| {
            let path = env(variable).filter(|path| !path.is_empty())?.into();
            Some(Self { path, variable })
        };
        names.iter().filter_map(file).collect()
    }
}

/// Texts that must not be shown.
#[derive(Clone, Default)]
pub(crate) struct RegistrySecrets(Vec<String>);

impl RegistrySecrets {
    fn add(&mut self, secret: &str) {
        if secret.len() >= 4 && !self.0.iter().any(|known| known == secret) {
            self.0.push(secret.to_owned());
        }
    }

    fn add_url(&mut self, url: &Url) {
        self.add(url.password().unwrap_or_default());
        // A token may stand in the place of the name.
        if url.password().is_none() {
            self.add(url.username());
        }
    }

    /// Replaces every secret in a text.
    pub(crate) fn mask(&self, text: &str) -> String {
        self.0
            .iter()
            .fold(text.to_owned(), |text, secret| text.replace(secret, "***"))
    }
}

/// Reads a configuration file of the operator; none if it is missing or too large.
fn read_config(path: &PathBuf) -> Option<String> {
    let size = std::fs::metadata(path).ok()?.len();
    if size > MAX_CONFIG_BYTES {
        tracing::warn!(path = %path.display(), size, "package configuration is too large and not read");
        return None;
    }
    std::fs::read_to_string(path).ok()
}

/// A URL of http or https.
fn web_url(text: &str) -> Option<Url> {
    let url = Url::parse(text.trim()).ok()?;
    matches!(url.scheme(), "http" | "https").then_some(url)
}

/// A URL without user and password.
fn without_credentials(mut url: Url) -> Url {
    // Fails only for URLs that cannot have them.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url
}
