//! Counts the connections from the network, all together and of each address, so that no client takes every descriptor.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

use parking_lot::Mutex;

use super::trusted_proxies::TrustedProxies;
use crate::config::clients::ClientSettings;

/// How many connections are open, and how many may be.
#[derive(Debug)]
pub(crate) struct ConnectionLimit {
    max: usize,
    max_per_address: usize,
    /// Their addresses stand for many clients, so only the total counts.
    proxies: TrustedProxies,
    open: Mutex<OpenCounts>,
}

#[derive(Debug, Default)]
struct OpenCounts {
    total: usize,
    by_address: HashMap<IpAddr, usize>,
}

/// One counted connection; dropped, it no longer counts.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    limit: Arc<ConnectionLimit>,
    address: IpAddr,
}

impl ConnectionLimit {
    /// At most `max_connections`, and of one address at most a quarter of that.
    pub(crate) fn new(settings: &ClientSettings) -> Arc<Self> {
        let max = settings.max_connections as usize;
        Arc::new(Self {
            max,
            max_per_address: (max / 4).max(1),
            proxies: settings.trusted_proxies.clone(),
            open: Mutex::default(),
        })
    }

    /// Counts a new connection; `None` if there are as many as may be.
    pub(crate) fn admit(self: &Arc<Self>, peer: IpAddr) -> Option<ConnectionPermit> {
        let address = client_key(peer);
        let mut open = self.open.lock();
        let of_address = open.by_address.get(&address).copied().unwrap_or(0);
        let address_full = of_address >= self.max_per_address && !self.proxies.contains(peer);
        if open.total >= self.max || address_full {
            return None;
        }
        open.total += 1;
        *open.by_address.entry(address).or_default() += 1;
        drop(open);
        Some(ConnectionPermit {
            limit: self.clone(),
            address,
        })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut open = self.limit.open.lock();
        open.total -= 1;
        if let Some(count) = open.by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                open.by_address.remove(&self.address);
            }
        }
    }
}

/// What counts as one client: an IPv4 address, or the /64 block of an IPv6 address, of which one machine has all.
pub(crate) fn client_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) if !v6.is_loopback() => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_address_has_a_quarter_and_all_together_the_whole() {
        let limit = ConnectionLimit::new(&ClientSettings {
            max_connections: 8,
            max_mcp_sessions: 8,
            trusted_proxies: TrustedProxies::parse(&["10.0.0.9".to_owned()]).unwrap(),
            secure_cookies: false,
        });
        let mut held: Vec<_> = (0..2).map(|_| limit.admit(ip("192.0.2.1")).unwrap()).collect();
        assert!(limit.admit(ip("192.0.2.1")).is_none());
        assert!(
            limit.admit(ip("::ffff:192.0.2.1")).is_none(),
            "the same address, mapped"
        );
        held.extend((0..5).map(|_| limit.admit(ip("10.0.0.9")).unwrap()));
        held.push(limit.admit(ip("192.0.2.2")).unwrap());
        assert!(limit.admit(ip("10.0.0.9")).is_none(), "a proxy's count too");
        held.clear();
        assert!(limit.admit(ip("192.0.2.1")).is_some());
        assert!(limit.open.lock().by_address.is_empty());
    }

    #[test]
    fn a_block_of_ipv6_addresses_is_one_client() {
        assert_eq!(
            client_key(ip("2001:db8:1:2:3::4")),
            client_key(ip("2001:db8:1:2:ffff::1"))
        );
        assert_ne!(
            client_key(ip("2001:db8:1:2::1")),
            client_key(ip("2001:db8:1:3::1"))
        );
        assert_eq!(client_key(ip("::1")), ip("::1"));
    }
}
