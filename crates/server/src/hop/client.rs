//! Requests to other servers of the cluster.

use std::{
    collections::HashMap,
    path::Path,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, header};
use oubliette_protocol::{Error, Result, ServerId};
use oubliette_store::PeerServer;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{
    PeerAddresses,
    door::HopStatus,
    signature::{CHALLENGE, CHALLENGE_USE, ClusterKey, GRANT, SIGNATURE, SignedRequest},
    wire::MAX_SILENCE,
};
use crate::{auth::Grant, config::ClusterConfig};

/// How long connecting to another server may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long another server may take to answer a request for a challenge.
const CHALLENGE_TIMEOUT: Duration = Duration::from_secs(4);
/// How long an idle connection is kept. Less than a server keeps one, so that a request does not meet its close.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a request is sent with a new challenge.
const MAX_ATTEMPTS: usize = 3;

/// Makes requests to other servers.
pub(crate) struct PeerClient {
    http: reqwest::Client,
    key: ClusterKey,
    own_id: ServerId,
    servers: watch::Receiver<PeerAddresses>,
    /// The newest challenge of each server, and when it came.
    challenges: Mutex<HashMap<ServerId, (String, Instant)>>,
}

/// A request to another server.
#[derive(Debug, Clone)]
pub(super) struct PeerRequest {
    pub(super) method: Method,
    /// Path and query, below `/internal`.
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// How long the head of the answer may take; none: as long as the other server runs.
    pub(super) head_timeout: Option<Duration>,
}

/// Why another server did not answer.
#[derive(Debug)]
pub(super) enum PeerFailure {
    /// It did nothing, so that the request may be sent again.
    NotTaken(Error),
    /// It did nothing, because it does not run the session.
    Moved,
    /// It may have done something.
    Unanswered(Error),
}

impl PeerRequest {
    /// A request with a JSON body. Its answer's head is sent at once.
    pub(super) fn post(path: impl Into<String>, body: &impl serde::Serialize) -> Result<Self> {
        Ok(Self {
            method: Method::POST,
            path: path.into(),
            headers: HeaderMap::new(),
            body: serde_json::to_vec(body).map_err(Error::internal)?.into(),
            head_timeout: Some(MAX_SILENCE),
        })
    }

    /// A request for a challenge, which a server with the same key answers with one.
    pub(super) fn for_challenge() -> Self {
        Self {
            method: Method::POST,
            path: "/internal/challenge".into(),
            headers: HeaderMap::new(),
            body: Bytes::new(),
            head_timeout: Some(CHALLENGE_TIMEOUT),
        }
    }

    /// The same request, whose answer has to begin within this time.
    pub(super) fn answered_within(mut self, limit: Duration) -> Self {
        self.head_timeout = Some(limit);
        self
    }

    /// The same request, made for a principal.
    pub(super) fn for_grant(mut self, grant: &Grant) -> Result<Self> {
        let text = serde_json::to_string(&grant.passed_on()).map_err(Error::internal)?;
        let mut value: http::HeaderValue = text.parse().map_err(Error::internal)?;
        value.set_sensitive(true);
        self.headers.insert(GRANT, value);
        Ok(self)
    }
}

/// The certificates of `[cluster] ca_file`.
fn read_authorities(file: &Path) -> Result<Vec<reqwest::Certificate>> {
    let failed = |why: &dyn std::fmt::Display| {
        Error::invalid(format!(
            "cluster.ca_file: {}: {why}; name a PEM file with the certificate of the authority that signed those of the servers",
            file.display()
        ))
    };
    let text = std::fs::read(file).map_err(|error| failed(&error))?;
    let found = reqwest::Certificate::from_pem_bundle(&text).map_err(|_| failed(&"it is not a PEM file"))?;
    match found.is_empty() {
        true => Err(failed(&"it has no certificate")),
        false => Ok(found),
    }
}

impl PeerClient {
    pub(super) fn new(
        config: &ClusterConfig,
        key: ClusterKey,
        own_id: ServerId,
        servers: watch::Receiver<PeerAddresses>,
    ) -> Result<Self> {
        let authorities = match &config.ca_file {
            Some(file) => read_authorities(file)?,
            None => Vec::new(),
        };
        // A client needs it, and may be the first in this process, as in a command.
        let _already = rustls::crypto::ring::default_provider().install_default();
        let builder = || {
            reqwest::Client::builder()
                .redirect(reqwest::redirect::Policy::none())
                .referer(false)
                // Servers reach each other directly: a proxy would see what passes between them.
                .no_proxy()
                .connect_timeout(CONNECT_TIMEOUT)
                .pool_idle_timeout(POOL_IDLE_TIMEOUT)
                .tcp_nodelay(true)
                // A connection that is cut is noticed within fifteen seconds, also while nothing is sent.
                .tcp_keepalive(Duration::from_secs(5))
                .tcp_keepalive_interval(Duration::from_secs(3))
                .tcp_keepalive_retries(3)
                .tcp_user_timeout(Duration::from_secs(15))
                .user_agent(concat!("oubliette/", env!("CARGO_PKG_VERSION")))
        };
        let http = builder()
            .tls_certs_merge(authorities.clone())
            .build()
            .or_else(|error| {
                tracing::warn!(%error, "the system's root certificates could not be loaded; over https other servers are reached with [cluster] ca_file alone");
                builder().tls_certs_only(authorities).build()
            });
        Ok(Self {
            http: http.map_err(|e| {
                Error::unavailable("connections to other servers cannot be prepared").with_cause(e)
            })?,
            key,
            own_id,
            servers,
            challenges: Mutex::default(),
        })
    }

    /// Completes when a server that runs now no longer does.
    pub(super) async fn gone(&self, server: &ServerId) {
        let mut servers = self.servers.clone();
        // The list at hand may be older than the server.
        servers.mark_unchanged();
        while servers.changed().await.is_ok() {
            if !servers.borrow_and_update().contains_key(server) {
                return;
            }
        }
        std::future::pending().await
    }

    /// Sends a request. What is returned is the other server's answer to it, whatever its status.
    pub(super) async fn send(
        &self,
        peer: &PeerServer,
        request: &PeerRequest,
    ) -> Result<reqwest::Response, PeerFailure> {
        let mut challenge = self.known_challenge(&peer.server_id);
        if challenge.is_none() {
            // Asked for first: the body is not sent in vain, and a server that does not answer has nothing to do yet.
            let answer = self
                .send_once(peer, &PeerRequest::for_challenge(), None)
                .await
                .map_err(|failure| match failure {
                    PeerFailure::Unanswered(error) => PeerFailure::NotTaken(error),
                    other => other,
                })?;
            challenge = self.note_challenge(&peer.server_id, &answer);
        }
        for _ in 0..MAX_ATTEMPTS {
            let answer = self.send_once(peer, request, challenge.as_deref()).await?;
            challenge = self.note_challenge(&peer.server_id, &answer);
            match HopStatus::of(answer.headers()) {
                Some(HopStatus::Taken) => return Ok(answer),
                Some(HopStatus::OldChallenge) => {}
                Some(HopStatus::Moved) => return Err(PeerFailure::Moved),
                Some(HopStatus::Refused) => {
                    tracing::error!(
                        server = %peer.server_id,
                        address = peer.address,
                        status = answer.status().as_u16(),
                        "another server refused this one's request: do both have the same cluster key?"
                    );
                    return Err(PeerFailure::NotTaken(Error::unavailable(
                        "the servers of this cluster do not accept each other; their logs say why",
                    )));
                }
                None => {
                    tracing::error!(
                        server = %peer.server_id,
                        address = peer.address,
                        status = answer.status().as_u16(),
                        "whatever listens at another server's address is not a server of this cluster: is its advertise right?"
                    );
                    return Err(PeerFailure::NotTaken(super::owner_unreachable(peer)));
                }
            }
        }
        Err(PeerFailure::NotTaken(super::owner_unreachable(peer)))
    }

    pub(super) async fn send_once(
        &self,
        peer: &PeerServer,
        request: &PeerRequest,
        challenge: Option<&str>,
    ) -> Result<reqwest::Response, PeerFailure> {
        let not_taken = |cause: oubliette_protocol::error::BoxedCause| {
            PeerFailure::NotTaken(super::owner_unreachable(peer).with_cause(cause))
        };
        let mut headers = request.headers.clone();
        // Would be added after signing otherwise.
        headers
            .entry(header::ACCEPT)
            .or_insert(HeaderValue::from_static("*/*"));
        let signed = SignedRequest {
            method: &request.method,
            path: &request.path,
            headers: &headers,
        };
        let signature = self
            .key
            .sign(&signed, &self.own_id, &peer.server_id, challenge, &request.body);
        let mut signature = signature.ok_or_else(|| not_taken("signing a request failed".into()))?;
        signature.set_sensitive(true);
        let url = format!("{}{}", peer.address.trim_end_matches('/'), request.path);
        let sending = self
            .http
            .request(request.method.clone(), url)
            .headers(headers)
            .header(SIGNATURE, signature)
            .body(request.body.clone())
            .send();
        let limit = async {
            match request.head_timeout {
                Some(limit) => tokio::time::sleep(limit).await,
                None => std::future::pending().await,
            }
        };
        let unanswered = |why: &str| {
            PeerFailure::Unanswered(Error::unavailable(format!(
                "the server that runs this session ({}) {why}; look whether it was done before you try again",
                peer.server_id
            )))
        };
        tokio::select! {
            sent = sending => sent.map_err(|error| {
                let error = error.without_url();
                match error.is_connect() || error.is_builder() {
                    true => not_taken(error.into()),
                    false => match unanswered("closed the connection") {
                        PeerFailure::Unanswered(text) => PeerFailure::Unanswered(text.with_cause(error)),
                        other => other,
                    },
                }
            }),
            () = limit => Err(unanswered("did not answer in time")),
            () = self.gone(&peer.server_id) => Err(unanswered("is gone")),
        }
    }

    fn known_challenge(&self, server: &ServerId) -> Option<String> {
        let challenges = self.challenges.lock();
        let (challenge, since) = challenges.get(server)?;
        (since.elapsed() < CHALLENGE_USE).then(|| challenge.clone())
    }

    /// Keeps the challenge of an answer.
    fn note_challenge(&self, server: &ServerId, answer: &reqwest::Response) -> Option<String> {
        let challenge = answer.headers().get(CHALLENGE)?.to_str().ok()?.to_owned();
        let now = Instant::now();
        let mut challenges = self.challenges.lock();
        // Servers get a new id at each start; what is no longer used is forgotten.
        challenges.retain(|_, (_, since)| since.elapsed() < CHALLENGE_USE);
        challenges.insert(server.clone(), (challenge.clone(), now));
        Some(challenge)
    }
}
