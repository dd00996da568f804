//! How requests between servers are authenticated: a code over the request's head and body, made with the cluster key.
//!
//! The key itself is never sent. Clocks of servers may differ by hours, so no timestamp says that a request is new: the
//! server that gets it hands out a challenge every few seconds ([`Challenges`]), takes requests made with one of the last
//! two only, and each nonce once. The code covers the ids of both servers, so a request cannot be sent to another
//! server, nor to the same one after it was started again.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use oubliette_protocol::ServerId;
use parking_lot::Mutex;
use rand::RngExt as _;
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// The header with the ids of both servers, challenge, nonce, the body's hash and the code.
pub(crate) const SIGNATURE: HeaderName = HeaderName::from_static("x-oubliette-cluster");
/// The header of a response with the challenge to use from now on.
pub(crate) const CHALLENGE: HeaderName = HeaderName::from_static("x-oubliette-challenge");
/// The header with the principal a request is made for.
pub(crate) const GRANT: HeaderName = HeaderName::from_static("x-oubliette-grant");

/// The headers that the code covers, besides its own: all that a server reads of another's request.
const COVERED_HEADERS: [&str; 6] = [
    "accept",
    "content-type",
    "last-event-id",
    "mcp-protocol-version",
    "mcp-session-id",
    "x-oubliette-grant",
];

/// Whether a client's header is passed on with its request: those that the code covers.
pub(super) fn is_passed_on(name: &HeaderName) -> bool {
    *name != GRANT && COVERED_HEADERS.contains(&name.as_str())
}

/// The version of the header's form.
const VERSION: &str = "v1";
/// In place of a challenge, of a server that has none yet.
const NO_CHALLENGE: &str = "-";
/// After this time, or this many requests, there is a new challenge. The one before stays valid as long again.
const CHALLENGE_PERIOD: Duration = Duration::from_secs(10);
const MAX_NONCES: usize = 100_000;
/// A challenge older than this is not used for a request: it may have ended when the request arrives.
pub(super) const CHALLENGE_USE: Duration = Duration::from_secs(8);

/// The key that all servers of a cluster share.
#[derive(Debug, Clone)]
pub(crate) struct ClusterKey(SecretString);

/// What of a request the code covers.
pub(super) struct SignedRequest<'a> {
    pub(super) method: &'a Method,
    /// Path and query.
    pub(super) path: &'a str,
    pub(super) headers: &'a HeaderMap,
}

/// The parts of the header [`SIGNATURE`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestSignature {
    pub(super) from: ServerId,
    pub(super) to: ServerId,
    challenge: String,
    nonce: String,
    /// SHA-256 of the body, in hexadecimal digits.
    pub(super) body_hash: String,
    code: String,
}

impl ClusterKey {
    pub(crate) fn new(key: SecretString) -> Self {
        Self(key)
    }

    /// The header of a request to another server.
    pub(super) fn sign(
        &self,
        request: &SignedRequest<'_>,
        from: &ServerId,
        to: &ServerId,
        challenge: Option<&str>,
        body: &[u8],
    ) -> Option<HeaderValue> {
        let mut nonce = [0u8; 16];
        rand::rng().fill(&mut nonce[..]);
        let mut signature = RequestSignature {
            from: from.clone(),
            to: to.clone(),
            challenge: challenge.unwrap_or(NO_CHALLENGE).to_owned(),
            nonce: hex::encode(nonce),
            body_hash: hash_body(body),
            code: String::new(),
        };
        signature.code = hex::encode(self.code(request, &signature)?.finalize().into_bytes());
        HeaderValue::from_str(&signature.to_header()).ok()
    }

    /// Whether a request was made with this key. The body is not read yet: its hash is compared when it is.
    pub(super) fn verify(&self, request: &SignedRequest<'_>, signature: &RequestSignature) -> bool {
        let (Some(code), Ok(given)) = (self.code(request, signature), hex::decode(&signature.code)) else {
            return false;
        };
        // Compared in constant time.
        code.verify_slice(&given).is_ok()
    }

    fn code(&self, request: &SignedRequest<'_>, signature: &RequestSignature) -> Option<Hmac<Sha256>> {
        let mut code = Hmac::<Sha256>::new_from_slice(self.0.expose_secret().as_bytes()).ok()?;
        let RequestSignature {
            from,
            to,
            challenge,
            nonce,
            body_hash,
            code: _,
        } = signature;
        let mut add = |part: &[u8]| {
            // With its length, so that no two requests have the same text.
            code.update(&(part.len() as u64).to_be_bytes());
            code.update(part);
        };
        add(b"oubliette request between servers");
        for part in [
            VERSION,
            request.method.as_str(),
            request.path,
            from.as_str(),
            to.as_str(),
            challenge,
            nonce,
            body_hash,
        ] {
            add(part.as_bytes());
        }
        for name in COVERED_HEADERS {
            let values: Vec<_> = request.headers.get_all(name).iter().collect();
            add(&(values.len() as u64).to_be_bytes());
            values.iter().for_each(|value| add(value.as_bytes()));
        }
        Some(code)
    }
}

fn is_hex(text: &str, length: usize) -> bool {
    text.len() == length && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// SHA-256 of a body, in hexadecimal digits.
pub(super) fn hash_body(body: &[u8]) -> String {
    hex::encode(Sha256::digest(body))
}

impl RequestSignature {
    /// Reads the header; `None` if there is none, or not of this form.
    pub(super) fn parse(headers: &HeaderMap) -> Option<Self> {
        let text = headers.get(SIGNATURE)?.to_str().ok()?;
        let mut parts = text.split(';');
        if parts.next()? != VERSION {
            return None;
        }
        let from = parts.next()?.parse().ok()?;
        let to = parts.next()?.parse().ok()?;
        let challenge = parts.next()?.to_owned();
        if challenge != NO_CHALLENGE && !is_hex(&challenge, 32) {
            return None;
        }
        let mut digits = |length: usize| {
            parts
                .next()
                .filter(|part| is_hex(part, length))
                .map(str::to_owned)
        };
        let parsed = Self {
            from,
            to,
            challenge,
            nonce: digits(32)?,
            body_hash: digits(64)?,
            code: digits(64)?,
        };
        parts.next().is_none().then_some(parsed)
    }

    fn to_header(&self) -> String {
        let Self {
            from,
            to,
            challenge,
            nonce,
            body_hash,
            code,
        } = self;
        format!("{VERSION};{from};{to};{challenge};{nonce};{body_hash};{code}")
    }
}

/// The challenges of a server: which requests are new.
#[derive(Debug)]
pub(super) struct Challenges(Mutex<ChallengeWindows>);

#[derive(Debug)]
struct ChallengeWindows {
    current: ChallengeWindow,
    previous: Option<ChallengeWindow>,
}

#[derive(Debug)]
struct ChallengeWindow {
    challenge: String,
    since: Instant,
    /// The nonces of requests that were taken.
    nonces: HashSet<String>,
}

/// Why a request with the right key is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotNew {
    /// It has an old challenge or none: it may be sent again with the current one.
    OldChallenge,
    /// It was taken before.
    Repeated,
}

impl ChallengeWindow {
    fn new(now: Instant) -> Self {
        let mut challenge = [0u8; 16];
        rand::rng().fill(&mut challenge[..]);
        Self {
            challenge: hex::encode(challenge),
            since: now,
            nonces: HashSet::new(),
        }
    }

    fn is(&self, challenge: &str) -> bool {
        self.challenge.as_bytes().ct_eq(challenge.as_bytes()).into()
    }
}

impl Challenges {
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(ChallengeWindows {
            current: ChallengeWindow::new(now),
            previous: None,
        }))
    }

    /// The challenge for requests to come.
    pub(super) fn current(&self, now: Instant) -> String {
        let mut windows = self.0.lock();
        windows.advance(now);
        windows.current.challenge.clone()
    }

    /// Takes a request whose code is right, once.
    pub(super) fn take(&self, signature: &RequestSignature, now: Instant) -> Result<(), NotNew> {
        let mut windows = self.0.lock();
        windows.advance(now);
        let ChallengeWindows { current, previous } = &mut *windows;
        let window = std::iter::once(current)
            .chain(previous)
            .find(|window| window.is(&signature.challenge))
            .ok_or(NotNew::OldChallenge)?;
        match window.nonces.insert(signature.nonce.clone()) {
            true => Ok(()),
            false => Err(NotNew::Repeated),
        }
    }
}

impl ChallengeWindows {
    fn advance(&mut self, now: Instant) {
        let age = now.duration_since(self.current.since);
        if age >= CHALLENGE_PERIOD || self.current.nonces.len() >= MAX_NONCES {
            let ended = std::mem::replace(&mut self.current, ChallengeWindow::new(now));
            self.previous = Some(ended);
        }
        let is_over = |window: &ChallengeWindow| now.duration_since(window.since) >= 2 * CHALLENGE_PERIOD;
        if self.previous.as_ref().is_some_and(is_over) {
            self.previous = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed(key: &ClusterKey, challenge: Option<&str>, path: &str) -> (HeaderMap, RequestSignature) {
        let mut headers = HeaderMap::new();
        headers.insert(GRANT, HeaderValue::from_static("{}"));
        let request = SignedRequest {
            method: &Method::POST,
            path,
            headers: &headers,
        };
        let header = key.sign(
            &request,
            &ServerId::generate(),
            &ServerId::generate(),
            challenge,
            b"body",
        );
        headers.insert(SIGNATURE, header.unwrap());
        let signature = RequestSignature::parse(&headers).unwrap();
        (headers, signature)
    }

    #[test]
    fn a_request_is_taken_only_as_it_was_signed() {
        let key = ClusterKey::new("0123456789abcdef".into());
        let (headers, signature) = signed(&key, None, "/internal/a?b=c");
        let verify = |key: &ClusterKey, method, path, headers: &HeaderMap, signature: &RequestSignature| {
            key.verify(
                &SignedRequest {
                    method,
                    path,
                    headers,
                },
                signature,
            )
        };
        let path = "/internal/a?b=c";
        assert!(verify(&key, &Method::POST, path, &headers, &signature));
        assert_eq!(signature.body_hash, hash_body(b"body"));
        let other = ClusterKey::new("0123456789abcdeg".into());
        assert!(!verify(&other, &Method::POST, path, &headers, &signature));
        assert!(!verify(&key, &Method::GET, path, &headers, &signature));
        assert!(!verify(
            &key,
            &Method::POST,
            "/internal/a?b=d",
            &headers,
            &signature
        ));
        let mut changed = headers.clone();
        changed.insert(GRANT, HeaderValue::from_static("{ }"));
        assert!(!verify(&key, &Method::POST, path, &changed, &signature));
        changed.remove(GRANT);
        assert!(!verify(&key, &Method::POST, path, &changed, &signature));
        let moved = RequestSignature {
            to: ServerId::generate(),
            ..signature.clone()
        };
        assert!(!verify(&key, &Method::POST, path, &headers, &moved));
        let body = RequestSignature {
            body_hash: hash_body(b"Body"),
            ..signature.clone()
        };
        assert!(!verify(&key, &Method::POST, path, &headers, &body));
        assert!(!format!("{key:?}").contains("0123456789abcdef"));
    }

    #[test]
    fn headers_of_another_form_are_refused() {
        let mut headers = HeaderMap::new();
        for bad in ["", "v1", "v2;a;b", "v1;x;y;-;-;-;-", "v1;;;;;;"] {
            headers.insert(SIGNATURE, HeaderValue::from_str(bad).unwrap());
            assert_eq!(RequestSignature::parse(&headers), None, "{bad}");
        }
    }

    #[test]
    fn a_request_is_taken_once_and_not_after_its_challenge_has_ended() {
        let key = ClusterKey::new("0123456789abcdef".into());
        let start = Instant::now();
        let challenges = Challenges::new(start);
        let (_, early) = signed(&key, None, "/");
        assert_eq!(challenges.take(&early, start), Err(NotNew::OldChallenge));
        let challenge = challenges.current(start);
        let (_, first) = signed(&key, Some(&challenge), "/");
        let (_, second) = signed(&key, Some(&challenge), "/");
        let (_, third) = signed(&key, Some(&challenge), "/");
        assert_eq!(challenges.take(&first, start), Ok(()));
        assert_eq!(challenges.take(&first, start), Err(NotNew::Repeated));
        // One period later the challenge is the previous one, and what was taken is still known.
        let later = start + CHALLENGE_PERIOD;
        assert_ne!(challenges.current(later), challenge);
        assert_eq!(challenges.take(&first, later), Err(NotNew::Repeated));
        assert_eq!(challenges.take(&second, later), Ok(()));
        let over = start + 2 * CHALLENGE_PERIOD;
        assert_eq!(challenges.take(&first, over), Err(NotNew::OldChallenge));
        assert_eq!(challenges.take(&third, over), Err(NotNew::OldChallenge));
    }
}
