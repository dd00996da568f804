//! `[egress] allow`: targets the proxy connects to although they are private or on another port than 80 and 443.

use std::net::{IpAddr, SocketAddr};

use http::StatusCode;
use oubliette_protocol::{Error, Result};

use crate::{address, refusal::EgressRefusal};

/// Ports that need no entry in the list.
const WEB_PORTS: [u16; 2] = [80, 443];

/// The parsed entries of `[egress] allow`.
#[derive(Debug, Clone, Default)]
pub struct EgressAllowList {
    rules: Vec<AllowRule>,
}

/// One parsed entry.
#[derive(Debug, Clone, PartialEq, Eq)]
struct AllowRule {
    target: AllowTarget,
    /// Only this port; `None`: every port.
    port: Option<u16>,
}

/// What an entry allows.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AllowTarget {
    /// A host name, in lower case.
    Host(String),
    /// Every name that ends in this suffix, which begins with a dot.
    Subdomains(String),
    /// A block of addresses, with the length of its prefix in bits.
    Cidr(IpAddr, u8),
}

impl EgressAllowList {
    /// Parses entries of the forms `host`, `host:port`, `*.suffix`, `*.suffix:port`, an address, `address:port` and
    /// CIDR blocks.
    pub fn parse(entries: &[String]) -> Result<Self> {
        Ok(Self {
            rules: entries
                .iter()
                .map(|entry| AllowRule::parse(entry))
                .collect::<Result<_>>()?,
        })
    }

    /// Checks that a connection to `host`, which resolved to `addresses`, may be made. Every address must
    /// pass: a name that resolves to one private address is refused altogether.
    pub(crate) fn check(
        &self,
        host: &str,
        port: u16,
        addresses: &[SocketAddr],
    ) -> std::result::Result<(), EgressRefusal> {
        if self.allows_name(host, port) {
            return Ok(());
        }
        for found in addresses.iter().map(SocketAddr::ip) {
            if self.allows_address(found, port) {
                continue;
            }
            if let Some(why) = address::refusal_reason(found) {
                let at = if found.to_string() == host {
                    String::new()
                } else {
                    format!(" is at {found}, which")
                };
                return Err(refusal(host, port, format!("{host}{at} is {why}")));
            }
            if !WEB_PORTS.contains(&port) {
                return Err(refusal(
                    host,
                    port,
                    format!("port {port} is not one of the web's (80, 443)"),
                ));
            }
        }
        Ok(())
    }

    /// Checks that the list names the target, by its name or, if that is one, by its address. The name is not looked up:
    /// a question to a name server can itself carry data out of the sandbox.
    pub(crate) fn check_listed(&self, host: &str, port: u16) -> std::result::Result<(), EgressRefusal> {
        let by_address = host
            .parse()
            .is_ok_and(|address: IpAddr| self.allows_address(address, port));
        match self.allows_name(host, port) || by_address {
            true => Ok(()),
            false => Err(EgressRefusal::new(
                StatusCode::FORBIDDEN,
                "not_allowed",
                format!("the sandbox may not connect to {host}:{port}, which is not one of its hosts"),
            )),
        }
    }

    fn allows_name(&self, host: &str, port: u16) -> bool {
        self.rules.iter().any(|rule| {
            let named = match &rule.target {
                AllowTarget::Host(name) => name == host,
                AllowTarget::Subdomains(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
                AllowTarget::Cidr(..) => false,
            };
            named && rule.port.is_none_or(|p| p == port)
        })
    }

    fn allows_address(&self, found: IpAddr, port: u16) -> bool {
        let found = found.to_canonical();
        self.rules.iter().any(|rule| match &rule.target {
            AllowTarget::Cidr(block, bits) => {
                in_block(found, *block, *bits) && rule.port.is_none_or(|p| p == port)
            }
            AllowTarget::Host(_) | AllowTarget::Subdomains(_) => false,
        })
    }
}

fn refusal(host: &str, port: u16, why: String) -> EgressRefusal {
    EgressRefusal::new(
        StatusCode::FORBIDDEN,
        "not_allowed",
        format!(
            "the sandbox may not connect to {host}:{port}: {why}. [egress] allow in oubliette.toml can name it"
        ),
    )
}

impl AllowRule {
    fn parse(entry: &str) -> Result<Self> {
        let wrong = |why: &str| Error::invalid(format!("[egress] allow: {entry:?}: {why}"));
        let text = entry.trim().to_ascii_lowercase();
        if let Some((block, bits)) = text.split_once('/') {
            let block: IpAddr = block
                .parse()
                .map_err(|_| wrong("the part before the slash is no address"))?;
            let bits = bits.parse().ok().filter(|b| *b <= address_bits(block));
            let bits = bits.ok_or_else(|| wrong("the part after the slash must be a number of bits"))?;
            return Ok(Self {
                target: AllowTarget::Cidr(block, bits),
                port: None,
            });
        }
        if let Ok(address) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
            return Ok(Self {
                target: AllowTarget::Cidr(address, address_bits(address)),
                port: None,
            });
        }
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(Self {
                target: AllowTarget::Cidr(address.ip(), address_bits(address.ip())),
                port: Some(address.port()),
            });
        }
        let (name, port) = match text.rsplit_once(':') {
            None => (text.as_str(), None),
            Some((name, port)) => {
                let port = port.parse().ok().filter(|p| *p != 0);
                (
                    name,
                    Some(port.ok_or_else(|| wrong("the part after the colon must be a port"))?),
                )
            }
        };
        let (under, name) = match name.strip_prefix("*.") {
            Some(suffix) => (true, suffix),
            None => (false, name),
        };
        let name = name.trim_end_matches('.');
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if name.is_empty() || !name.bytes().all(plain) {
            return Err(wrong(
                "write a host, host:port, *.suffix or an address block such as 10.0.0.0/8",
            ));
        }
        let what = if under {
            AllowTarget::Subdomains(format!(".{name}"))
        } else {
            AllowTarget::Host(name.to_owned())
        };
        Ok(Self { target: what, port })
    }
}

fn address_bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn in_block(found: IpAddr, block: IpAddr, bits: u8) -> bool {
    let same = |a: u128, b: u128, width: u8| {
        let beyond = width.saturating_sub(bits);
        a.checked_shr(beyond.into()).unwrap_or(0) == b.checked_shr(beyond.into()).unwrap_or(0)
    };
    match (found, block) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(u32::from(a).into(), u32::from(b).into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.into(), b.into(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(entries: &[&str], host: &str, address: &str, port: u16) -> bool {
        let entries: Vec<String> = entries.iter().map(|e| (*e).to_owned()).collect();
        let found = SocketAddr::new(address.parse().unwrap(), port);
        EgressAllowList::parse(&entries)
            .unwrap()
            .check(host, port, &[found])
            .is_ok()
    }

    #[test]
    fn without_entries_only_public_addresses_on_web_ports_are_allowed() {
        assert!(allows(&[], "example.com", "93.184.216.34", 443));
        assert!(allows(&[], "example.com", "93.184.216.34", 80));
        assert!(!allows(&[], "example.com", "93.184.216.34", 22));
        assert!(!allows(&[], "example.com", "10.0.0.1", 443));
        assert!(!allows(&[], "127.0.0.1", "127.0.0.1", 80));
    }

    #[test]
    fn entries_allow_what_they_name() {
        assert!(allows(&["Git.Internal."], "git.internal", "10.0.0.1", 9418));
        assert!(allows(&["git.internal:22"], "git.internal", "10.0.0.1", 22));
        assert!(!allows(&["git.internal:22"], "git.internal", "10.0.0.1", 443));
        assert!(allows(&["*.internal"], "a.b.internal", "10.0.0.1", 80));
        assert!(!allows(&["*.internal"], "internal", "10.0.0.1", 80));
        assert!(!allows(&["*.internal"], "evilinternal", "10.0.0.1", 80));
        assert!(allows(&["10.0.0.0/8"], "x", "10.255.0.1", 8080));
        assert!(!allows(&["10.0.0.0/8"], "x", "11.0.0.1", 8080));
        assert!(allows(&["127.0.0.1:5000"], "x", "::ffff:127.0.0.1", 5000));
        assert!(!allows(&["127.0.0.1:5000"], "x", "127.0.0.1", 5001));
        assert!(allows(&["[::1]:80"], "x", "::1", 80));
        assert!(allows(&["fd00::/8"], "x", "fd12::1", 80));
        assert!(allows(&["::/0"], "x", "::1", 80) && !allows(&["::/0"], "x", "10.0.0.1", 80));
        assert!(allows(&["0.0.0.0/0"], "x", "10.0.0.1", 25));
    }

    #[test]
    fn a_name_with_one_private_address_is_refused() {
        let addresses = ["93.184.216.34:443", "10.0.0.1:443"].map(|a| a.parse().unwrap());
        let refusal = EgressAllowList::default()
            .check("rebind.example", 443, &addresses)
            .unwrap_err();
        assert!(
            refusal.message.contains("10.0.0.1") && refusal.message.contains("[egress] allow"),
            "{}",
            refusal.message
        );
    }

    #[test]
    fn a_list_of_hosts_names_all_that_is_reached() {
        let list = EgressAllowList::parse(&["pkg.example:443".into(), "127.0.0.1:4873".into()]).unwrap();
        assert!(list.check_listed("pkg.example", 443).is_ok());
        assert!(list.check_listed("127.0.0.1", 4873).is_ok());
        for (host, port) in [("pkg.example", 80), ("other.example", 443), ("127.0.0.1", 22)] {
            assert!(list.check_listed(host, port).is_err(), "{host}:{port}");
        }
    }

    #[test]
    fn an_invalid_entry_is_an_error_that_names_the_setting() {
        for entry in [
            "",
            "*",
            "*.",
            "a b",
            "10.0.0.0/33",
            "x/8",
            "host:port",
            "host:0",
            "http://x",
        ] {
            let error = EgressAllowList::parse(&[entry.to_owned()]).expect_err(entry);
            assert!(error.message.contains("[egress] allow"), "{}", error.message);
        }
    }
}
