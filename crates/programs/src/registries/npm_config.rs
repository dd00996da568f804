//! npm's configuration: `.npmrc` files and `npm_config_*` variables.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    CertificateFile, CredentialAccess, EnvironmentVariables, RegistryHosts, RegistrySecrets, read_config,
    web_url, without_credentials,
};

/// npm's own default.
const DEFAULT_REGISTRY: &str = "https://registry.npmjs.org/";
/// Places of npm's global configuration, for the prefixes that distributions use.
const GLOBAL_CONFIGS: [&str; 3] = ["/etc/npmrc", "/usr/etc/npmrc", "/usr/local/etc/npmrc"];

/// The settings of npm's configuration that an installation uses.
#[derive(Clone, Default)]
pub(crate) struct NpmConfig {
    /// Registry, registries of scopes, credentials and TLS settings, by their names in `.npmrc`.
    settings: BTreeMap<String, String>,
    pub(crate) hosts: RegistryHosts,
    pub(crate) secrets: RegistrySecrets,
    pub(crate) certificates: Vec<CertificateFile>,
}

impl NpmConfig {
    /// Reads the configuration as npm would for the server's user. Later sources override earlier ones.
    pub(crate) fn read(env: &EnvironmentVariables) -> Self {
        let mut settings = BTreeMap::new();
        let variable = |name: &str| {
            env(&format!("npm_config_{name}"))
                .or_else(|| env(&format!("NPM_CONFIG_{}", name.to_ascii_uppercase())))
                .filter(|value| !value.is_empty())
        };
        let global = variable("globalconfig").map(|path| vec![PathBuf::from(path)]);
        let mut files = global.unwrap_or_else(|| GLOBAL_CONFIGS.map(PathBuf::from).to_vec());
        let user = variable("userconfig").map(PathBuf::from);
        files.extend(user.or_else(|| Some(PathBuf::from(env("HOME")?).join(".npmrc"))));
        for text in files.iter().filter_map(read_config) {
            parse_npmrc(&text, env, &mut settings);
        }
        for name in ["registry", "cafile", "strict_ssl"] {
            if let Some(value) = variable(name) {
                settings.insert(name.replace('_', "-"), value);
            }
        }
        let mut config = Self::from_settings(settings);
        config.certificates.extend(CertificateFile::from_variables(
            &["NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE"],
            env,
        ));
        config
    }

    fn from_settings(mut settings: BTreeMap<String, String>) -> Self {
        settings
            .entry("registry".into())
            .or_insert_with(|| DEFAULT_REGISTRY.into());
        let mut config = Self {
            certificates: settings
                .remove("cafile")
                .map(|path| CertificateFile {
                    path: path.into(),
                    variable: "npm_config_cafile",
                })
                .into_iter()
                .collect(),
            ..Self::default()
        };
        for (name, value) in &settings {
            if is_registry(name)
                && let Some(url) = web_url(value)
            {
                config.hosts.add_url(&url);
                config.secrets.add_url(&url);
            }
            if is_credential(name) {
                config.secrets.add(value);
            }
        }
        config.settings = settings;
        config
    }

    /// An `.npmrc` with these settings.
    pub(crate) fn npmrc(&self, credentials: CredentialAccess) -> String {
        let mut text = String::new();
        for (name, value) in &self.settings {
            let value = match credentials {
                CredentialAccess::Given => value.clone(),
                CredentialAccess::Withheld if is_credential(name) => continue,
                CredentialAccess::Withheld if is_registry(name) => {
                    web_url(value).map_or_else(|| value.clone(), |url| without_credentials(url).to_string())
                }
                CredentialAccess::Withheld => value.clone(),
            };
            text.push_str(&format!("{name}={value}\n"));
        }
        text
    }
}

fn is_registry(name: &str) -> bool {
    name == "registry" || name.starts_with('@') && name.ends_with(":registry")
}

/// Credentials are set for a registry: `//host/:_authToken`.
fn is_credential(name: &str) -> bool {
    name.starts_with("//")
}

fn is_used(name: &str) -> bool {
    let secret_of_registry = ["_authToken", "_auth", "_password", "username", "email"]
        .iter()
        .any(|field| name.ends_with(&format!(":{field}")));
    is_registry(name)
        || is_credential(name) && secret_of_registry
        || matches!(name, "cafile" | "strict-ssl" | "replace-registry-host")
}

/// Adds the settings of an `.npmrc` that an installation uses.
fn parse_npmrc(text: &str, env: &EnvironmentVariables, settings: &mut BTreeMap<String, String>) {
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with([';', '#', '[']) {
            continue;
        }
        let Some((name, value)) = line.split_once('=') else {
            continue;
        };
        let (name, value) = (expand(name.trim(), env), value.trim());
        let quoted = value.strip_prefix('"').and_then(|v| v.strip_suffix('"'));
        let value = expand(quoted.unwrap_or(value), env);
        if is_used(&name) && !value.is_empty() && !value.contains(['\n', '\r']) {
            settings.insert(name, value);
        }
    }
}

/// Replaces `${NAME}` by variables of the environment, as npm does; one that is not set stays.
fn expand(text: &str, env: &EnvironmentVariables) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        let Some(end) = rest[start..].find('}').map(|at| start + at) else {
            break;
        };
        out.push_str(&rest[..start]);
        match env(&rest[start + 2..end]) {
            Some(value) => out.push_str(&value),
            None => out.push_str(&rest[start..=end]),
        }
        rest = &rest[end + 1..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(npmrc: &str, vars: &'static [(&'static str, &'static str)]) -> NpmConfig {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(".npmrc"), npmrc).unwrap();
        let home = dir.path().to_str().unwrap().to_owned();
        let env = move |name: &str| match name {
            "HOME" => Some(home.clone()),
            "npm_config_globalconfig" => Some("/dev/null".into()),
            _ => vars
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_owned()),
        };
        NpmConfig::read(&env)
    }

    #[test]
    fn without_a_setting_the_public_registry_is_the_only_host() {
        let config = config("fund=false\n", &[]);
        assert_eq!(config.hosts.entries(), ["registry.npmjs.org:443"]);
    }

    #[test]
    fn registries_of_files_and_variables_are_the_hosts() {
        let npmrc = "# mine\nregistry = http://127.0.0.1:4873/\n@corp:registry=https://npm.corp.example/x/\n";
        assert_eq!(
            config(npmrc, &[]).hosts.entries(),
            ["127.0.0.1:4873", "npm.corp.example:443"]
        );
        let with = config(npmrc, &[("NPM_CONFIG_REGISTRY", "http://localhost:1234")]);
        assert_eq!(with.hosts.entries(), ["localhost:1234", "npm.corp.example:443"]);
    }

    #[test]
    fn credentials_reach_only_steps_that_may_have_them_and_are_masked() {
        let npmrc =
            "registry=https://user:hunter22@h.example/\n//h.example/:_authToken=${TOKEN}\nignore=me\n";
        let config = config(npmrc, &[("TOKEN", "npm_secret1")]);
        let given = config.npmrc(CredentialAccess::Given);
        assert!(
            given.contains("_authToken=npm_secret1") && given.contains("hunter22"),
            "{given}"
        );
        assert!(!given.contains("ignore"));
        let withheld = config.npmrc(CredentialAccess::Withheld);
        assert_eq!(withheld, "registry=https://h.example/\n");
        assert_eq!(config.secrets.mask("GET npm_secret1 hunter22"), "GET *** ***");
    }
}
