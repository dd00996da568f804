//! `egress` of `agent.json` and `tool.json`: the hosts that a sandbox with `network: "proxy"` may reach.

use std::{fmt, net::IpAddr, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{agent::NetworkAccess, id::quoted, strict::FieldError};

/// Maximum number of entries of an `egress` list.
pub const MAX_EGRESS_ENTRIES: usize = 256;
/// Maximum number of services in `sandbox.upstreams`.
pub const MAX_UPSTREAMS: usize = 64;

/// An entry of an `egress` list: a host name, an address, or `*.` and a domain, which stands for every name below it;
/// then, optionally, a colon and a port. Without a port it holds for every port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPattern {
    /// As written.
    text: Box<str>,
    hosts: MatchedHosts,
    port: Option<u16>,
}

/// The hosts an entry stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum MatchedHosts {
    /// This name, in lower case.
    Name(Box<str>),
    /// Every name with this ending, which begins with a dot.
    Subdomains(Box<str>),
    /// This address.
    Address(IpAddr),
}

impl HostPattern {
    /// The entry as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether a connection to this host and port is meant. `host` is in lower case, without brackets and without a dot
    /// at its end.
    pub fn matches(&self, host: &str, port: u16) -> bool {
        if self.port.is_some_and(|only| only != port) {
            return false;
        }
        match &self.hosts {
            MatchedHosts::Name(name) => **name == *host,
            MatchedHosts::Subdomains(ending) => host.len() > ending.len() && host.ends_with(&**ending),
            MatchedHosts::Address(address) => host
                .parse::<IpAddr>()
                .is_ok_and(|asked| asked.to_canonical() == *address),
        }
    }
}

impl FromStr for HostPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("{} {why}", quoted(text));
        let lower = text.to_ascii_lowercase();
        if let Ok(address) = lower.parse::<IpAddr>() {
            return Ok(Self {
                text: text.into(),
                hosts: MatchedHosts::Address(address.to_canonical()),
                port: None,
            });
        }
        let (host, port) = match lower.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                let digits = port.bytes().all(|b| b.is_ascii_digit());
                let port = port.parse::<u16>().ok().filter(|port| digits && *port != 0);
                let port = port.ok_or_else(|| {
                    wrong("is no host and port: use host or host:port, without a scheme or a path")
                })?;
                (host, Some(port))
            }
            _ => (lower.as_str(), None),
        };
        let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let hosts = if let Some(inner) = bracketed {
            let address = inner.parse::<std::net::Ipv6Addr>();
            let address = address.map_err(|_| wrong("has no IPv6 address between its brackets"))?;
            MatchedHosts::Address(IpAddr::V6(address).to_canonical())
        } else if let Ok(address) = host.parse::<IpAddr>() {
            if address.is_ipv6() {
                return Err(wrong("needs brackets around its address"));
            }
            MatchedHosts::Address(address)
        } else if host == "*" {
            return Err(wrong(
                "would be every host: leave egress out for that, or write *.domain",
            ));
        } else {
            let (wildcard, name) = match host.strip_prefix("*.") {
                Some(domain) => (true, domain),
                None => (false, host),
            };
            let name = name.strip_suffix('.').unwrap_or(name);
            check_name(name).map_err(wrong)?;
            match wildcard {
                true => MatchedHosts::Subdomains(format!(".{name}").into()),
                false => MatchedHosts::Name(name.into()),
            }
        };
        Ok(Self {
            text: text.into(),
            hosts,
            port,
        })
    }
}

/// Checks a host name in lower case.
fn check_name(name: &str) -> Result<(), &'static str> {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'_'))
    };
    if name.contains('*') {
        return Err("has a * elsewhere than as its first label: write *.domain");
    }
    if name.len() > 253 || !name.split('.').all(label) {
        return Err("is no host name: letters, digits, - and _ in labels of at most 63, separated by dots");
    }
    // A resolver reads such a name as an IPv4 address in one of its short forms, or in octal or hexadecimal.
    let last = name.rsplit('.').next().unwrap_or_default();
    if last.starts_with("0x") || last.bytes().all(|b| b.is_ascii_digit()) {
        return Err("is no host name: an address is written as four numbers");
    }
    Ok(())
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for HostPattern {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for HostPattern {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl schemars::JsonSchema for HostPattern {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "HostPattern".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "maxLength": 262 })
    }
}

/// Reads a list that is there: `null` is refused, because leaving a list out means every public host.
pub(crate) fn some_list<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<HostPattern>>, D::Error> {
    Vec::deserialize(from).map(Some)
}

/// Checks a list's length, and that the network it narrows is the proxy's.
pub(crate) fn check_list(
    field: &str,
    list: Option<&[HostPattern]>,
    network: NetworkAccess,
) -> Result<(), FieldError> {
    let Some(list) = list else { return Ok(()) };
    if network != NetworkAccess::Proxy {
        return Err(FieldError::at(field, "works only with \"network\": \"proxy\""));
    }
    match list.len() > MAX_EGRESS_ENTRIES {
        true => Err(FieldError::at(
            field,
            format!(
                "has {} entries; at most {MAX_EGRESS_ENTRIES} are allowed",
                list.len()
            ),
        )),
        false => Ok(()),
    }
}

/// Checks the name of an `[upstreams.NAME]` section: 1 to 64 of letters, digits, `-`, `_` and `.`, the first a letter or
/// a digit.
pub fn check_upstream_name(name: &str) -> Result<(), &'static str> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    match first && name.len() <= 64 && name.bytes().all(plain) {
        true => Ok(()),
        false => Err("a name is 1 to 64 of letters, digits, -, _ and ., the first a letter or a digit"),
    }
}

/// Checks the names in `sandbox.upstreams`.
pub(crate) fn check_upstreams(field: &str, names: &[String]) -> Result<(), FieldError> {
    if names.len() > MAX_UPSTREAMS {
        return Err(FieldError::at(
            field,
            format!("has {} entries; at most {MAX_UPSTREAMS} are allowed", names.len()),
        ));
    }
    for (i, name) in names.iter().enumerate() {
        let at = |why: &str| FieldError::at(format!("{field}[{i}]"), format!("{}: {why}", quoted(name)));
        check_upstream_name(name).map_err(at)?;
        if names[..i].contains(name) {
            return Err(at("is listed twice"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matches(entry: &str, host: &str, port: u16) -> bool {
        entry.parse::<HostPattern>().unwrap().matches(host, port)
    }

    #[test]
    fn an_entry_matches_what_it_names_and_nothing_else() {
        assert!(matches("api.github.com", "api.github.com", 443));
        assert!(matches("API.GitHub.com.", "api.github.com", 80));
        assert!(!matches("api.github.com", "github.com", 443));
        assert!(!matches("api.github.com", "api.github.com.evil.org", 443));
        assert!(!matches("github.com", "evilgithub.com", 443));
        assert!(matches("*.npmjs.org:443", "registry.npmjs.org", 443));
        assert!(matches("*.npmjs.org:443", "a.b.npmjs.org", 443));
        assert!(!matches("*.npmjs.org:443", "registry.npmjs.org", 80));
        assert!(!matches("*.npmjs.org", "npmjs.org", 443));
        assert!(!matches("*.npmjs.org", ".npmjs.org", 443));
        assert!(!matches("*.npmjs.org", "evilnpmjs.org", 443));
        assert!(matches("127.0.0.1:8000", "127.0.0.1", 8000));
        assert!(matches("127.0.0.1:8000", "::ffff:127.0.0.1", 8000));
        assert!(!matches("127.0.0.1:8000", "127.1", 8000));
        assert!(matches("::1", "::1", 9) && matches("[::1]:9", "0:0::1", 9));
        assert!(matches("localhost", "localhost", 1));
    }

    #[test]
    fn what_is_no_host_is_refused_with_a_reason() {
        for (entry, reason) in [
            ("", "no host name"),
            ("*", "every host"),
            ("*:443", "every host"),
            ("*.", "no host name"),
            ("*.*.org", "first label"),
            ("a*.org", "first label"),
            ("a.*.org", "first label"),
            ("https://x.org", "without a scheme"),
            ("x.org/path", "no host name"),
            ("x.org:0", "without a scheme"),
            ("x.org:70000", "without a scheme"),
            ("x.org:+80", "without a scheme"),
            ("x.org:", "without a scheme"),
            ("user@x.org", "no host name"),
            ("a b", "no host name"),
            ("ä.org", "no host name"),
            ("-a.org", "no host name"),
            ("a..org", "no host name"),
            ("10.0.0.0/8", "no host name"),
            ("127.1", "four numbers"),
            ("2130706433", "four numbers"),
            ("0x7f.0x1", "four numbers"),
            ("*.0.0.1", "four numbers"),
            ("[x]", "IPv6"),
        ] {
            let error = entry.parse::<HostPattern>().expect_err(entry);
            assert!(error.contains(reason), "{entry}: {error}");
        }
    }

    proptest! {
        #[test]
        fn a_pattern_without_a_wildcard_matches_one_name(entry in "[a-z]{1,5}(\\.[a-z]{1,5}){0,2}", host in "[a-z.]{1,12}") {
            prop_assert_eq!(matches(&entry, &host, 1), entry == host);
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,60}") {
            let _ = text.parse::<HostPattern>();
        }
    }
}
