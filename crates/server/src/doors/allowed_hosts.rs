//! The check of the Host and Origin headers. It keeps a page of another site, open in a user's browser, from reaching
//! a server on the user's machine (DNS rebinding, cross-site requests).

use http::{HeaderMap, Uri, header, uri::Authority};

/// The host names this server answers to, besides loopback: name and, optionally, the only port.
#[derive(Debug, Clone, Default)]
pub(crate) struct AllowedHosts(Vec<(String, Option<u16>)>);

impl AllowedHosts {
    /// From `allowed_hosts` of the configuration and the address the server listens on.
    pub(crate) fn new(allowed: &[String], listen: std::net::SocketAddr) -> Self {
        let mut hosts: Vec<_> = allowed.iter().filter_map(|text| parse_authority(text)).collect();
        if !listen.ip().is_unspecified() {
            hosts.push((listen.ip().to_string(), None));
        }
        Self(hosts)
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
        let loopback = host == "localhost" || host == "::1" || is_loopback_v4(host);
        loopback
            || self
                .0
                .iter()
                .any(|(name, only)| name == host && (only.is_none() || only == port))
    }
}

fn is_loopback_v4(host: &str) -> bool {
    host.parse::<std::net::Ipv4Addr>()
        .is_ok_and(|ip| ip.is_loopback())
}

fn parse_authority(text: &str) -> Option<(String, Option<u16>)> {
    let authority: Authority = text.trim().parse().ok()?;
    if authority.as_str().contains('@') {
        return None;
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (host.to_ascii_lowercase(), authority.port_u16()))
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
            "",
        ] {
            assert!(!is_accepted(bad, None), "{bad}");
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
            "http://localhost/x",
        ] {
            assert!(!is_accepted("localhost", Some(bad)), "{bad}");
        }
    }
}
