//! `[server] trusted_proxies`: whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed.

use std::net::IpAddr;

use http::HeaderMap;
use ipnet::IpNet;

use super::DoorKind;

/// The addresses of the reverse proxies in front of this server.
#[derive(Debug, Clone, Default)]
pub(crate) struct TrustedProxies(Vec<IpNet>);

/// Who sends a request, as far as it can be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClientOrigin {
    /// The client's address; that of a proxy if the proxy does not tell.
    pub(crate) address: IpAddr,
    /// Whether the client's connection is encrypted, up to here or up to a trusted proxy.
    pub(crate) encrypted: bool,
}

impl TrustedProxies {
    /// From addresses (`127.0.0.1`) and blocks (`10.0.0.0/8`); the error is the text that is neither.
    pub(crate) fn parse(texts: &[String]) -> Result<Self, String> {
        let nets = texts.iter().map(|text| {
            let address = text.parse::<IpAddr>().map(|ip| IpNet::from(ip.to_canonical()));
            address
                .or_else(|_| text.parse::<IpNet>())
                .map_err(|_| text.clone())
        });
        nets.collect::<Result<_, _>>().map(Self)
    }

    /// Whether an address is a proxy's.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|net| net.contains(&address))
    }

    /// Who sends a request. The headers count only if the connection comes from a trusted proxy.
    pub(crate) fn client_origin(&self, door: DoorKind, headers: &HeaderMap) -> ClientOrigin {
        let (peer, tls) = match door {
            DoorKind::Network { peer, tls } => (peer, tls),
            DoorKind::Control => (IpAddr::from([127, 0, 0, 1]), false),
        };
        if !self.contains(peer) {
            return ClientOrigin {
                address: peer,
                encrypted: tls,
            };
        }
        ClientOrigin {
            address: self.forwarded_for(peer, headers),
            encrypted: tls || forwarded_proto_is_https(headers),
        }
    }

    /// The last address of `X-Forwarded-For` that is not a trusted proxy's. Each proxy appends the address it was
    /// connected from, so what precedes that one was written by the client and may be anything.
    fn forwarded_for(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let values: Vec<_> = headers
            .get_all("x-forwarded-for")
            .iter()
            .map(|value| value.to_str().unwrap_or("?"))
            .collect();
        let mut client = peer;
        for text in values.iter().flat_map(|value| value.split(',')).rev() {
            let Some(address) = parse_address(text.trim()) else {
                break;
            };
            client = address;
            if !self.contains(address) {
                break;
            }
        }
        client
    }
}

/// An address of `X-Forwarded-For`, which some proxies write with brackets or a port.
fn parse_address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let address = bare.unwrap_or(text).parse::<IpAddr>();
    let address = address.or_else(|_| text.parse::<std::net::SocketAddr>().map(|socket| socket.ip()));
    address.ok().map(|address| address.to_canonical())
}

/// By the last value: the proxy nearest to this server wrote it.
fn forwarded_proto_is_https(headers: &HeaderMap) -> bool {
    let last = headers.get_all("x-forwarded-proto").iter().next_back();
    last.and_then(|value| value.to_str().ok())
        .and_then(|value| value.rsplit(',').next())
        .is_some_and(|proto| proto.trim().eq_ignore_ascii_case("https"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(peer: &str, forwarded: &[&str], proto: Option<&str>) -> ClientOrigin {
        let proxies = TrustedProxies::parse(&["127.0.0.1".to_owned(), "10.0.0.0/8".to_owned()]).unwrap();
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append("x-forwarded-for", value.parse().unwrap());
        }
        if let Some(proto) = proto {
            headers.insert("x-forwarded-proto", proto.parse().unwrap());
        }
        let door = DoorKind::Network {
            peer: peer.parse().unwrap(),
            tls: false,
        };
        proxies.client_origin(door, &headers)
    }

    #[test]
    fn the_last_untrusted_address_is_the_clients() {
        for (peer, forwarded, client) in [
            ("127.0.0.1", vec!["192.0.2.7"], "192.0.2.7"),
            // What the client wrote itself precedes what the proxy appended.
            ("127.0.0.1", vec!["198.51.100.1, 192.0.2.7"], "192.0.2.7"),
            (
                "127.0.0.1",
                vec!["198.51.100.1", "192.0.2.7, 10.1.2.3"],
                "192.0.2.7",
            ),
            ("::ffff:127.0.0.1", vec!["192.0.2.7:4711"], "192.0.2.7"),
            ("127.0.0.1", vec!["[2001:db8::1]"], "2001:db8::1"),
            ("127.0.0.1", vec!["192.0.2.7, nonsense"], "127.0.0.1"),
            ("127.0.0.1", vec![], "127.0.0.1"),
            ("127.0.0.1", vec!["10.0.0.1"], "10.0.0.1"),
            // Nobody else is believed.
            ("192.0.2.9", vec!["192.0.2.7"], "192.0.2.9"),
        ] {
            let found = origin(peer, &forwarded, None).address;
            assert_eq!(found, client.parse::<IpAddr>().unwrap(), "{peer} {forwarded:?}");
        }
    }

    #[test]
    fn only_a_trusted_proxy_says_that_the_client_is_encrypted() {
        assert!(origin("127.0.0.1", &[], Some("https")).encrypted);
        assert!(origin("127.0.0.1", &[], Some("http, HTTPS")).encrypted);
        assert!(!origin("127.0.0.1", &[], Some("https, http")).encrypted);
        assert!(!origin("192.0.2.9", &[], Some("https")).encrypted);
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for bad in ["", "localhost", "10.0.0.0/33", "*"] {
            assert_eq!(TrustedProxies::parse(&[bad.to_owned()]).unwrap_err(), bad);
        }
    }
}
