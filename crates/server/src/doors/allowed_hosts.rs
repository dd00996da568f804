//! The check of the Host and Origin headers. It keeps a page of another site, open in a user's browser, from reaching
//! a server on the user's machine (DNS rebinding, cross-site requests).

use std::{net::Ipv6Addr, sync::Arc};

use arc_swap::ArcSwap;
use http::{HeaderMap, Uri, header};
use oubliette_protocol::Error;

/// The host names this server answers to, besides loopback: name and, optionally, the only port.
#[derive(Debug)]
pub(crate) struct AllowedHosts {
    /// The address it listens on, which it answers to as well.
    listen: std::net::SocketAddr,
    /// Changes when the configuration is read again.
    hosts: ArcSwap<Vec<(String, Option<u16>)>>,
}

impl AllowedHosts {
    /// From `allowed_hosts` of the configuration and the address the server listens on.
    pub(crate) fn new(allowed: &[String], listen: std::net::SocketAddr) -> Self {
        let hosts = Self {
            listen,
            hosts: ArcSwap::default(),
        };
        hosts.set_allowed(allowed);
        hosts
    }

    /// Replaces `allowed_hosts`, for the requests that come from now on.
    pub(crate) fn set_allowed(&self, allowed: &[String]) {
        let mut hosts: Vec<_> = allowed.iter().filter_map(|text| parse_authority(text)).collect();
        if !self.listen.ip().is_unspecified() {
            hosts.push((self.listen.ip().to_string(), None));
        }
        self.hosts.store(Arc::new(hosts));
    }

    /// Fails unless the request's Host names this server and its Origin, if it has one, is a page of this server.
    pub(crate) fn check_request(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), &'static str> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = match (hosts.next(), hosts.next()) {
            (Some(_), Some(_)) => return Err("more than one Host header"),
            (Some(host), None) => host.to_str().ok().and_then(parse_authority),
            (None, _) => uri.authority().and_then(|a| parse_authority(a.as_str())),
        };
        let host = host.ok_or("the Host header is missing or malformed")?;
        if !self.contains(&host) {
            return Err(
                "the Host header names another server; list it under [server] allowed_hosts if it is this one",
            );
        }
        let mut origins = headers.get_all(header::ORIGIN).iter();
        match (origins.next(), origins.next()) {
            (None, _) => Ok(()),
            (Some(origin), None) => {
                let origin = origin
                    .to_str()
                    .ok()
                    .and_then(origin_host)
                    .ok_or("the Origin header is not one of a page")?;
                match self.contains(&origin) {
                    true => Ok(()),
                    false => Err("the Origin header names a page of another server"),
                }
            }
            (Some(_), Some(_)) => Err("more than one Origin header"),
        }
    }

    fn contains(&self, (host, port): &(String, Option<u16>)) -> bool {
        is_loopback(host)
            || self
                .hosts
                .load()
                .iter()
                .any(|(name, only)| name == host && (only.is_none() || only == port))
    }
}

/// Fails for a request of a page on this machine that is not one of this server: of another port. To a browser it is
/// the same site, so it sends the login cookie along (`SameSite` does not look at the port).
pub(crate) fn require_own_page(headers: &HeaderMap) -> Result<(), Error> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(origin) = text(header::ORIGIN) else {
        return Ok(());
    };
    let own = text(header::HOST).and_then(parse_authority);
    match origin_host(origin) {
        Some(page) if is_loopback(&page.0) && Some(&page) != own.as_ref() => Err(Error::permission_denied(
            "the Origin header names a page of another program on this machine",
        )),
        _ => Ok(()),
    }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host == "::1" || is_loopback_v4(host)
}

fn is_loopback_v4(host: &str) -> bool {
    host.parse::<std::net::Ipv4Addr>()
        .is_ok_and(|ip| ip.is_loopback())
}

/// Splits `host[:port]`, with an IPv6 address in brackets, into host in lower case and port. Anything else is refused:
/// a parser that overlooks a part lets a page of another host pass for this server.
fn parse_authority(text: &str) -> Option<(String, Option<u16>)> {
    let text = text.trim();
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            (address.parse::<Ipv6Addr>().ok()?.to_string(), port)
        }
        None => {
            let at = text.find(':').unwrap_or(text.len());
            let (name, port) = text.split_at(at);
            let is_host_byte = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
            if name.is_empty() || !name.bytes().all(is_host_byte) {
                return None;
            }
            (name.to_ascii_lowercase(), port)
        }
    };
    match port.strip_prefix(':') {
        None if port.is_empty() => Some((host, None)),
        None => None,
        Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => {
            Some((host, Some(digits.parse().ok()?)))
        }
        Some(_) => None,
    }
}

fn origin_host(origin: &str) -> Option<(String, Option<u16>)> {
    let rest = origin
        .strip_prefix("http://")
        .or_else(|| origin.strip_prefix("https://"))?;
    (!rest.contains('/')).then(|| parse_authority(rest)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_accepted(host: &str, origin: Option<&str>) -> bool {
        let hosts = AllowedHosts::new(&["example.com".into(), "h:81".into()], ([10, 0, 0, 1], 80).into());
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().unwrap());
        }
        hosts.check_request(&Uri::from_static("/"), &headers).is_ok()
    }

    #[test]
    fn loopback_and_listed_hosts_are_this_server() {
        for good in [
            "localhost",
            "localhost:8080",
            "127.0.0.1:9",
            "[::1]:8080",
            "EXAMPLE.com",
            "example.com:444",
            "h:81",
            "10.0.0.1",
        ] {
            assert!(is_accepted(good, None), "{good}");
        }
        for bad in [
            "evil.test",
            "localhost.evil.test",
            "example.com.evil",
            "h:82",
            "10.0.0.2",
            "a@localhost",
            "127.0.0.1.evil",
            "[::1].evil.test",
            "[::1]evil.test:80",
            "[::1]:80.evil.test",
            "[::1",
            "::1]",
            "[localhost]",
            "localhost:80:evil.test",
            "localhost:",
            "localhost/evil.test",
            "localhost#evil.test",
            "evil.test\\localhost",
            "",
        ] {
            assert!(!is_accepted(bad, None), "{bad}");
        }
    }

    #[test]
    fn a_page_of_another_local_port_is_not_ours() {
        let is_own = |host: &str, origin: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().unwrap());
            headers.insert(header::ORIGIN, origin.parse().unwrap());
            require_own_page(&headers).is_ok()
        };
        for (host, origin) in [
            ("127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("LOCALHOST:8080", "http://localhost:8080"),
            ("[::1]:8080", "http://[::1]:8080"),
            // A server behind a proxy: the first check has found the page's host among the allowed ones.
            ("127.0.0.1:8080", "https://example.com"),
        ] {
            assert!(is_own(host, origin), "{host} {origin}");
        }
        for (host, origin) in [
            ("127.0.0.1:8080", "http://127.0.0.1:3000"),
            ("127.0.0.1:8080", "http://127.0.0.1"),
            ("localhost:8080", "http://127.0.0.1:8080"),
            ("example.com", "http://localhost"),
        ] {
            assert!(!is_own(host, origin), "{host} {origin}");
        }
    }

    #[test]
    fn only_origins_of_this_server_are_accepted() {
        for good in [
            "http://localhost:8080",
            "http://127.0.0.1:5173",
            "https://example.com",
        ] {
            assert!(is_accepted("localhost", Some(good)), "{good}");
        }
        for bad in [
            "http://evil.test",
            "null",
            "",
            "file://",
            "https://example.com.evil",
            "http://[::1].evil.test",
            "http://localhost:80@evil.test",
            "http://localhost/x",
        ] {
            assert!(!is_accepted("localhost", Some(bad)), "{bad}");
        }
    }
}
