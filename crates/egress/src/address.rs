//! Which IP addresses a sandbox may not reach: all that are not public.
//!
//! For IPv4 the non-public blocks are listed; for IPv6 only the global unicast block is public, and an
//! address that embeds an IPv4 address is judged by that one too.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Why a sandbox may not reach this address; `None` if it is public.
pub(crate) fn refusal_reason(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(v4) => refused_v4(v4),
        IpAddr::V6(v6) => refused_v6(v6),
    }
}

fn refused_v4(address: Ipv4Addr) -> Option<&'static str> {
    let [a, b, c, _] = address.octets();
    match (a, b, c) {
        (0, ..) => Some("this network (0.0.0.0/8)"),
        (10, ..) | (172, 16..=31, _) | (192, 168, _) => Some("a private address"),
        (100, 64..=127, _) => Some("a carrier's shared address (100.64.0.0/10)"),
        (127, ..) => Some("a loopback address"),
        (169, 254, _) => Some("a link-local address"),
        (192, 0, 0) => Some("a protocol assignment (192.0.0.0/24)"),
        (192, 0, 2) | (198, 51, 100) | (203, 0, 113) => Some("an address for documentation"),
        (192, 88, 99) => Some("a relay address (192.88.99.0/24)"),
        (198, 18..=19, _) => Some("an address for benchmarks (198.18.0.0/15)"),
        (224..=239, ..) => Some("a multicast address"),
        (240..=255, ..) => Some("a reserved or broadcast address"),
        _ => None,
    }
}

fn refused_v6(address: Ipv6Addr) -> Option<&'static str> {
    let s = address.segments();
    let last_v4 = || ipv4_from(s[6], s[7]);
    match s {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some("the unspecified address"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("a loopback address"),
        // IPv4-mapped and the well-known NAT64 prefix: judged as the embedded address.
        [0, 0, 0, 0, 0, 0xffff, _, _] | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => refused_v4(last_v4()),
        [0xfc00..=0xfdff, ..] => Some("a private address (fc00::/7)"),
        [0xfe80..=0xfebf, ..] => Some("a link-local address"),
        [0xfec0..=0xfeff, ..] => Some("a site-local address"),
        [0xff00..=0xffff, ..] => Some("a multicast address"),
        [0x2001, 0, ..] => Some("a Teredo address"),
        [0x2001, 0x10..=0x3f, ..] => Some("an identifier, not an address (ORCHID)"),
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => Some("an address for documentation"),
        [0x2002, high, low, ..] => refused_v4(ipv4_from(high, low)),
        // ISATAP: an IPv4 address in the interface identifier, behind any prefix.
        [0x2000..=0x3fff, _, _, _, 0 | 0x200, 0x5efe, _, _] => refused_v4(last_v4()),
        [0x2000..=0x3fff, ..] => None,
        _ => Some("an address that is not global"),
    }
}

fn ipv4_from(high: u16, low: u16) -> Ipv4Addr {
    let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
    Ipv4Addr::new(a, b, c, d)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_refused(text: &str) -> bool {
        refusal_reason(text.parse().unwrap()).is_some()
    }

    #[test]
    fn public_addresses_pass() {
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "172.15.0.1",
            "172.32.0.1",
            "100.63.0.1",
            "100.128.0.1",
            "192.169.0.1",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00:1450::1",
            "64:ff9b::808:808",
            "::ffff:8.8.8.8",
            "2002:808:808::1",
        ] {
            assert!(!is_refused(address), "{address}");
        }
    }

    #[test]
    fn non_public_addresses_are_refused() {
        for address in [
            "127.0.0.1",
            "127.255.0.9",
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "100.64.0.1",
            "100.127.0.1",
            "169.254.169.254",
            "169.254.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "192.0.0.192",
            "198.18.0.1",
            "::",
            "::1",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "fec0::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "::ffff:0:10.0.0.1",
            "64:ff9b::a00:1",
            "64:ff9b:1::808:808",
            "2002:7f00:1::",
            "2002:a9fe:a9fe::",
            "2001:0:1::1",
            "2001:db8::1",
            "2a00::5efe:10.0.0.1",
            "2a00::200:5efe:192.168.0.1",
            "100::1",
            "4000::1",
        ] {
            assert!(is_refused(address), "{address}");
        }
    }

    proptest! {
        /// An IPv4 address embedded in an IPv6 address is judged like the IPv4 address.
        #[test]
        fn an_embedded_ipv4_address_is_judged_as_itself(bits: u32) {
            let v4 = Ipv4Addr::from(bits);
            let [a, b, c, d] = v4.octets();
            let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
            let plain = refusal_reason(IpAddr::V4(v4)).is_some();
            prop_assert_eq!(refusal_reason(IpAddr::V6(v4.to_ipv6_mapped())).is_some(), plain);
            for dressed in [
                Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
                Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
                Ipv6Addr::new(0x2a00, 1, 2, 3, 0, 0x5efe, high, low),
            ] {
                prop_assert_eq!(refusal_reason(IpAddr::V6(dressed)).is_some(), plain, "{}", dressed);
            }
            prop_assert!(refusal_reason(IpAddr::V6(v4.to_ipv6_compatible())).is_some());
        }

        /// Agrees with the standard library's classification.
        #[test]
        fn what_std_calls_special_is_refused(bits: u32, wide: u128) {
            let v4 = Ipv4Addr::from(bits);
            if v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_broadcast() || v4.is_multicast() || v4.is_unspecified() || v4.is_documentation() {
                prop_assert!(refusal_reason(IpAddr::V4(v4)).is_some(), "{}", v4);
            }
            let v6 = Ipv6Addr::from(wide);
            if v6.is_loopback() || v6.is_multicast() || v6.is_unique_local() || v6.is_unicast_link_local() || v6.is_unspecified() {
                prop_assert!(refusal_reason(IpAddr::V6(v6)).is_some(), "{}", v6);
            }
        }

        /// Every address of a block, not just the examples above.
        #[test]
        fn every_address_of_a_non_public_block_is_refused(host: u32) {
            for (block, bits) in [("10.0.0.0", 8), ("100.64.0.0", 10), ("127.0.0.0", 8), ("169.254.0.0", 16), ("172.16.0.0", 12), ("192.168.0.0", 16), ("198.18.0.0", 15), ("224.0.0.0", 3), ("0.0.0.0", 8)] {
                let block = u32::from(block.parse::<Ipv4Addr>().unwrap());
                let v4 = Ipv4Addr::from(block | (host & (u32::MAX >> bits)));
                prop_assert!(refusal_reason(IpAddr::V4(v4)).is_some(), "{}", v4);
            }
        }
    }
}
