//! `[cluster]`: several servers on one PostgreSQL database.

use std::path::PathBuf;

use hmac::{Hmac, KeyInit, Mac};
use oubliette_protocol::{Error, Result, agent::check_env_name};
use oubliette_store::{ClusterOptions, DatabaseUrl};
use reqwest::Url;
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;

use super::{EnvLookup, field_error, raw::RawCluster};

/// Minimum length of the cluster key, in characters.
const MIN_KEY_CHARS: usize = 16;
/// What the key's fingerprint is a code of. Changing it makes every key look like another one.
const FINGERPRINT_TEXT: &[u8] = b"oubliette cluster key fingerprint";

/// `[cluster]`, with the key read from the environment. Not shown: the key.
#[derive(Debug, Clone)]
pub(crate) struct ClusterConfig {
    /// `advertise`: the base address at which the other servers reach this one, without a path.
    pub advertise: Url,
    /// `key_env`: the variable that holds the key.
    pub key_env: String,
    /// The key that all servers of the cluster share.
    pub key: SecretString,
    /// `ca_file`: certificates of authorities that are trusted between servers, besides the system's.
    pub ca_file: Option<PathBuf>,
}

impl ClusterConfig {
    /// What the store is told of it.
    pub(crate) fn store_options(&self) -> Result<ClusterOptions> {
        let mut code = <Hmac<Sha256> as KeyInit>::new_from_slice(self.key.expose_secret().as_bytes())
            .map_err(Error::internal)?;
        code.update(FINGERPRINT_TEXT);
        Ok(ClusterOptions {
            address: self.advertise.as_str().trim_end_matches('/').to_owned(),
            key_fingerprint: hex::encode(code.finalize().into_bytes()),
        })
    }
}

/// Checks the section. None if there is none.
pub(super) fn resolve(
    raw: Option<RawCluster>,
    store: Option<&DatabaseUrl>,
    env: EnvLookup<'_>,
) -> Result<Option<ClusterConfig>> {
    let Some(raw) = raw else { return Ok(None) };
    if store.is_none() {
        return Err(field_error(
            "cluster",
            "several servers share a PostgreSQL database: set [store] url or OUBLIETTE_STORE_URL, or leave [cluster] out",
        ));
    }
    let advertise = parse_advertise(&raw.advertise).map_err(|why| field_error("cluster.advertise", why))?;
    let key_env = raw.key_env;
    check_env_name(&key_env).map_err(|why| field_error("cluster.key_env", format!("{key_env:?}: {why}")))?;
    let key = env(&key_env).filter(|key| !key.is_empty()).ok_or_else(|| {
        field_error(
            "cluster.key_env",
            format!(
                "{key_env} is not set: give every server the same key in it, made for example by openssl rand -hex 32"
            ),
        )
    })?;
    if key.chars().count() < MIN_KEY_CHARS {
        return Err(field_error(
            "cluster.key_env",
            format!(
                "the key in {key_env} is shorter than {MIN_KEY_CHARS} characters: make one by openssl rand -hex 32"
            ),
        ));
    }
    if let Some(ca_file) = &raw.ca_file
        && !ca_file.is_absolute()
    {
        return Err(field_error("cluster.ca_file", "it is not an absolute path"));
    }
    Ok(Some(ClusterConfig {
        advertise,
        key_env,
        key: key.into(),
        ca_file: raw.ca_file,
    }))
}

fn parse_advertise(text: &str) -> Result<Url, String> {
    let form =
        "use the address at which the other servers reach this one, such as \"https://one.example.com:8080\"";
    let url = Url::parse(text).map_err(|error| format!("{error}; {form}"))?;
    if url.path() != "/" || url.query().is_some() || url.fragment().is_some() {
        return Err(format!("it has more than a host and a port; {form}"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(format!("it has a user or a password, which are not sent; {form}"));
    }
    match (url.scheme(), is_loopback(&url)) {
        ("https", _) | ("http", true) => Ok(url),
        ("http", false) => Err(
            "http is for loopback only, since tokens and results pass between servers: use https, with tls_cert and tls_key under [server]"
                .to_owned(),
        ),
        (other, _) => Err(format!("{other} is not http or https; {form}")),
    }
}

fn is_loopback(url: &Url) -> bool {
    match url.host_str() {
        Some("localhost" | "[::1]") => true,
        Some(host) => host
            .parse::<std::net::Ipv4Addr>()
            .is_ok_and(|address| address.is_loopback()),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::config::ServerConfig;

    const STORE: &str = "[store]\nurl = \"postgres://h/d\"\n";

    fn parse(text: &str) -> oubliette_protocol::Result<ServerConfig> {
        ServerConfig::parse(text, "oubliette.toml", &|name| match name {
            "KEY" => Some("0123456789abcdef".into()),
            "SHORT" => Some("0123456789abcde".into()),
            _ => None,
        })
    }

    #[test]
    fn a_section_is_checked_and_its_key_never_shown() {
        let section = |advertise: &str, key: &str| {
            parse(&format!(
                "{STORE}[cluster]\nadvertise = {advertise:?}\nkey_env = \"{key}\""
            ))
        };
        let config = section("http://127.0.0.1:8081", "KEY").unwrap();
        assert!(!format!("{config:?}").contains("0123456789abcdef"));
        let options = config.cluster.unwrap().store_options().unwrap();
        assert_eq!(options.address, "http://127.0.0.1:8081");
        assert_eq!(options.key_fingerprint.len(), 64);
        for good in [
            "https://one.example.com",
            "http://localhost:1",
            "http://[::1]:8080",
        ] {
            section(good, "KEY").unwrap();
        }
        for (advertise, key, word) in [
            ("http://one.example.com", "KEY", "use https"),
            ("https://one.example.com/path", "KEY", "host and a port"),
            ("https://me@one.example.com", "KEY", "user"),
            ("ftp://one.example.com", "KEY", "not http"),
            ("one", "KEY", "cluster.advertise"),
            ("https://one.example.com", "ABSENT", "is not set"),
            ("https://one.example.com", "SHORT", "shorter than 16"),
            ("https://one.example.com", "A B", "cluster.key_env"),
        ] {
            let error = section(advertise, key).unwrap_err();
            assert!(error.message.contains(word), "{advertise} {key}: {error}");
        }
        let with_ca = |file: &str| section("https://one.example.com", &format!("KEY\"\nca_file = \"{file}"));
        let config = with_ca("/etc/ca.pem").unwrap().cluster.unwrap();
        assert_eq!(
            config.ca_file.as_deref(),
            Some(std::path::Path::new("/etc/ca.pem"))
        );
        let error = with_ca("ca.pem").unwrap_err();
        assert!(error.message.contains("cluster.ca_file"), "{error}");
        let error = parse("[cluster]\nadvertise = \"https://h\"\nkey_env = \"KEY\"").unwrap_err();
        assert!(error.message.contains("[store] url"), "{error}");
        let error = parse(&format!(
            "{STORE}[cluster]\nadvertise = \"https://h\"\nkey_env = \"KEY\"\n[trust]\nenv = [\"KEY\"]"
        ));
        assert!(error.unwrap_err().message.contains("never given"));
    }
}
