//! pip's configuration: `pip.conf` files and `PIP_*` variables, and the indexes that uv's variables name.

use std::path::PathBuf;

use url::Url;

use super::{
    CertificateFile, CredentialAccess, EnvironmentVariables, RegistryHosts, RegistrySecrets, read_config,
    web_url, without_credentials,
};

/// pip's own default, and the host its files are on.
const DEFAULT_INDEX: &str = "https://pypi.org/simple";
const DEFAULT_FILES_HOST: &str = "files.pythonhosted.org:443";

/// The settings of pip's configuration that an installation uses.
#[derive(Clone, Default)]
pub(crate) struct PipConfig {
    index: Option<Url>,
    extra: Vec<Url>,
    trusted: Vec<String>,
    pub(crate) hosts: RegistryHosts,
    pub(crate) secrets: RegistrySecrets,
    pub(crate) certificates: Vec<CertificateFile>,
}

impl PipConfig {
    /// Reads the configuration as pip would for the server's user. Later sources override earlier ones.
    pub(crate) fn read(env: &EnvironmentVariables) -> Self {
        let mut config = Self::default();
        let home = env("HOME").map(PathBuf::from);
        let mut files = vec![PathBuf::from("/etc/pip.conf")];
        if let Some(home) = &home {
            files.push(home.join(".pip/pip.conf"));
        }
        let user = env("XDG_CONFIG_HOME").map(PathBuf::from);
        files.extend(
            user.or_else(|| home.map(|home| home.join(".config")))
                .map(|dir| dir.join("pip/pip.conf")),
        );
        files.extend(env("PIP_CONFIG_FILE").map(PathBuf::from));
        for text in files.iter().filter_map(read_config) {
            config.add_file(&text);
        }
        let settings = [
            ("index-url", ["UV_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"]),
            (
                "extra-index-url",
                ["UV_EXTRA_INDEX_URL", "UV_INDEX", "PIP_EXTRA_INDEX_URL"],
            ),
            ("trusted-host", ["", "", "PIP_TRUSTED_HOST"]),
            ("find-links", ["", "", "PIP_FIND_LINKS"]),
            ("cert", ["", "", "PIP_CERT"]),
        ];
        for (setting, names) in settings {
            for value in names.iter().filter_map(|name| env(name)) {
                config.set(setting, &value);
            }
        }
        config.certificates.extend(CertificateFile::from_variables(
            &["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"],
            env,
        ));
        config.finish()
    }

    /// Reads the sections that apply to `pip install`.
    fn add_file(&mut self, text: &str) {
        let mut applies = false;
        let mut setting = String::new();
        for line in text.lines() {
            let trimmed = line.trim();
            if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
                continue;
            }
            if let Some(section) = trimmed.strip_prefix('[') {
                applies = matches!(section.trim_end_matches(']').trim(), "global" | "install");
                setting.clear();
            } else if !applies {
            } else if line.starts_with([' ', '\t']) {
                // A further value of the setting above.
                self.set(&setting.clone(), trimmed);
            } else if let Some((name, value)) = trimmed.split_once(['=', ':']) {
                setting = name.trim().replace('_', "-").to_ascii_lowercase();
                self.set(&setting.clone(), value);
            }
        }
    }

    fn set(&mut self, setting: &str, value: &str) {
        // uv's indexes may have a name: `corp=https://…`.
        let url =
            |word: &str| web_url(word).or_else(|| web_url(word.split_once('=').map_or("", |(_, url)| url)));
        let words = value.split_whitespace();
        match setting {
            "index-url" => self.index = words.filter_map(url).next().or(self.index.take()),
            "extra-index-url" => self.extra.extend(words.filter_map(url)),
            // Files in a folder of the host are not seen in the sandbox.
            "find-links" => words.filter_map(url).for_each(|url| self.hosts.add_url(&url)),
            "trusted-host" => self.trusted.extend(words.map(str::to_owned)),
            "cert" => {
                self.certificates = vec![CertificateFile {
                    path: value.trim().into(),
                    variable: "PIP_CERT",
                }];
            }
            _ => {}
        }
    }

    fn finish(mut self) -> Self {
        let index = self.index.take().or_else(|| web_url(DEFAULT_INDEX));
        for url in index.iter().chain(&self.extra) {
            self.hosts.add_url(url);
            self.secrets.add_url(url);
            if url.host_str() == Some("pypi.org") {
                self.hosts.add_entry(DEFAULT_FILES_HOST.into());
            }
        }
        for host in &self.trusted {
            self.hosts.add_entry(host.clone());
        }
        self.index = index;
        self
    }

    /// The variables that give pip this configuration.
    pub(crate) fn variables(&self, credentials: CredentialAccess) -> Vec<(String, String)> {
        let shown = |url: &Url| match credentials {
            CredentialAccess::Given => url.to_string(),
            CredentialAccess::Withheld => without_credentials(url.clone()).to_string(),
        };
        let mut variables = vec![("PIP_CONFIG_FILE".into(), "/dev/null".into())];
        if let Some(index) = &self.index {
            variables.push(("PIP_INDEX_URL".into(), shown(index)));
        }
        if !self.extra.is_empty() {
            let extra: Vec<String> = self.extra.iter().map(shown).collect();
            variables.push(("PIP_EXTRA_INDEX_URL".into(), extra.join(" ")));
        }
        if !self.trusted.is_empty() {
            variables.push(("PIP_TRUSTED_HOST".into(), self.trusted.join(" ")));
        }
        variables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pip_conf: &str, vars: &'static [(&'static str, &'static str)]) -> PipConfig {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pip.conf");
        std::fs::write(&file, pip_conf).unwrap();
        let file = file.to_str().unwrap().to_owned();
        let env = move |name: &str| match name {
            "PIP_CONFIG_FILE" => Some(file.clone()),
            _ => vars
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_owned()),
        };
        PipConfig::read(&env)
    }

    #[test]
    fn without_a_setting_the_public_index_and_its_files_are_the_hosts() {
        assert_eq!(
            config("", &[]).hosts.entries(),
            ["files.pythonhosted.org:443", "pypi.org:443"]
        );
    }

    #[test]
    fn indexes_of_files_and_variables_are_the_hosts() {
        let text = "[global]\nindex-url = https://u:hunter22@pip.example/simple\nextra-index-url =\n  http://10.0.0.7:3141/a\n  http://b.example/x\n[list]\nindex-url = http://not.example\n";
        let config = config(
            text,
            &[
                ("PIP_TRUSTED_HOST", "files.example:8000"),
                ("UV_INDEX", "corp=https://uv.example/simple"),
            ],
        );
        assert_eq!(
            config.hosts.entries(),
            [
                "10.0.0.7:3141",
                "b.example:80",
                "files.example:8000",
                "pip.example:443",
                "uv.example:443"
            ]
        );
        let given = config.variables(CredentialAccess::Given);
        assert!(given.iter().any(|(_, value)| value.contains("hunter22")));
        let withheld = config.variables(CredentialAccess::Withheld);
        assert!(
            !withheld.iter().any(|(_, value)| value.contains("hunter22")),
            "{withheld:?}"
        );
        assert_eq!(config.secrets.mask("with hunter22"), "with ***");
    }
}
