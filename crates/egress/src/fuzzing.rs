//! The fuzz target of a sandbox's requests to the proxy and to the model gateway.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};

use crate::{
    ServiceRule, allow_list::EgressAllowList, headers, paths::ModelRequestPath, proxy,
    service_path::ServicePath,
};

/// Reads a request from text and decides about it, without a network. Panics only when something is let through that
/// must be refused.
///
/// The text: `<method> <target>` on the first line, then a header `name: value` a line, or `+<entry>` for an entry of
/// `[egress] allow`.
#[doc(hidden)]
pub fn fuzz_request(text: &str) {
    let mut lines = text.lines();
    let Some((method, target)) = lines.next().and_then(|line| line.split_once(' ')) else {
        return;
    };
    let (mut fields, mut entries) = (HeaderMap::new(), Vec::new());
    for line in lines {
        match (line.strip_prefix('+'), line.split_once(": ")) {
            (Some(entry), _) => entries.push(entry.to_owned()),
            (None, Some((name, value))) => {
                if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
                    fields.append(name, value);
                }
            }
            (None, None) => {}
        }
    }
    fuzz_headers(&fields);
    let (Ok(method), Ok(uri)) = (Method::from_bytes(method.as_bytes()), target.parse::<Uri>()) else {
        return;
    };
    fuzz_proxy(&uri, &entries);
    fuzz_gateway(&method, &uri);
    fuzz_service(&method, &uri);
}

/// An address is reached only if it is public, or an entry names it.
fn fuzz_proxy(uri: &Uri, entries: &[String]) {
    let Ok(host) = proxy::host_of(uri) else { return };
    assert!(host.is_ascii() && !host.contains('@') && !host.is_empty());
    let port = uri.port_u16().unwrap_or(80);
    let nothing = EgressAllowList::default();
    let listed = EgressAllowList::parse(entries);
    let addresses: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(address) => vec![(address, port).into()],
        Err(_) => vec![([93, 184, 215, 14], port).into(), ([10, 0, 0, 1], port).into()],
    };
    if let Ok(list) = &listed {
        let _ = list.check(&host, port, &addresses);
    }
    if nothing.check(&host, port, &addresses).is_ok() {
        assert!(matches!(port, 80 | 443), "port {port} without an entry");
        for address in addresses {
            assert!(
                !is_local(address.ip().to_canonical()),
                "{address} without an entry"
            );
        }
    }
}

/// Whether the standard library calls an address local in some way: independent of our own table.
fn is_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            v4.is_loopback()
                || v4.is_private()
                || v4.is_link_local()
                || v4.is_unspecified()
                || v4.is_multicast()
                || v4.is_broadcast()
        }
        IpAddr::V6(v6) => {
            v6.is_loopback()
                || v6.is_unspecified()
                || v6.is_multicast()
                || v6.is_unique_local()
                || v6.is_unicast_link_local()
        }
    }
}

/// What is sent to a provider is one plain path beneath its own.
fn fuzz_gateway(method: &Method, uri: &Uri) {
    let Ok(path) = ModelRequestPath::parse(uri) else {
        return;
    };
    if path.check(method, &[]).is_err() {
        return;
    }
    for base in ["", "/v1", "/v1beta/openai"] {
        let sent = path.provider_path(base);
        assert!(sent.starts_with(base.trim_end_matches("/v1")) && sent.starts_with('/'));
        let odd = |part: &str| part.is_empty() || part.bytes().all(|b| b == b'.');
        assert!(!sent.split('/').skip(1).any(odd), "{sent}");
        assert!(!sent.contains(['%', '\\', '?', '#', ' ']), "{sent}");
    }
}

/// What is sent to a service is beneath an allowed path, however that is written.
fn fuzz_service(method: &Method, uri: &Uri) {
    let Ok(rule) = ServiceRule::parse(&["GET".to_owned()], &["ok/*".to_owned()]) else {
        return;
    };
    let Ok(path) = ServicePath::parse(uri) else { return };
    if rule.allowing(method, &path.rest).is_none() {
        return;
    }
    assert!(matches!(*method, Method::GET | Method::HEAD));
    let sent = path.full_path("/base");
    assert!(sent.starts_with("/base/ok/"), "{sent}");
    let odd = |part: &str| !part.is_empty() && part.bytes().all(|b| b == b'.');
    assert!(!sent.contains("//") && !sent.split('/').any(odd), "{sent}");
    let lower = sent.to_ascii_lowercase();
    for trick in ["%2e", "%2f", "%5c", "%25", "%3b", "\\", ";", "%0"] {
        assert!(!lower.contains(trick), "{sent}");
    }
}

fn fuzz_headers(fields: &HeaderMap) {
    let passed = headers::to_provider(fields);
    for private in [
        "authorization",
        "x-api-key",
        "cookie",
        "proxy-authorization",
        "host",
        "transfer-encoding",
    ] {
        assert!(!passed.contains_key(private), "{private} is passed on");
    }
    let back = headers::from_provider(fields);
    assert!(!back.contains_key("set-cookie") && !back.contains_key("connection"));
}
