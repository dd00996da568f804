//! Checks of the servers that share a database: each server's version, sign of life, clock, and whether it is reached from here
//! with this server's key.

use std::{collections::BTreeMap, time::Duration};

use futures::future::join_all;
use oubliette_protocol::{Result, ServerId};
use oubliette_store::{ClusterHealth, PeerServer, ServerHealth, Store};
use serde_json::Value;

use super::{CheckImportance, check_result};
use crate::{
    app::App,
    config::ClusterConfig,
    hop::{client::PeerClient, probe::ProbeOutcome},
};

/// How many servers are asked at once.
const PROBES_AT_ONCE: usize = 16;
/// A server that is not heard of for this long is about to be declared dead: it is heard of every two seconds.
const MAX_SILENCE: Duration = Duration::from_secs(6);
/// A clock that is further off than this, in milliseconds, is worth a word.
const MAX_CLOCK_DIFFERENCE_MS: i64 = 2_000;

/// Whose checks these are.
struct Viewpoint<'a> {
    /// The server that asks; none if it is stopped.
    own_id: Option<&'a ServerId>,
    config: &'a ClusterConfig,
    /// Asks the servers.
    client: &'a PeerClient,
}

/// Checks the cluster of a running server; nothing without one.
pub(super) async fn check_cluster(app: &App) -> Vec<Value> {
    let (Some(config), Some(hop)) = (&app.config.cluster, &app.hop) else {
        return Vec::new();
    };
    let viewpoint = Viewpoint {
        own_id: Some(hop.server_id()),
        config,
        client: hop.peer_client(),
    };
    checks(&viewpoint, app.store.cluster_health().await).await
}

/// Checks the cluster of a server that is stopped, as the database and the other servers show it.
pub(super) async fn check_cluster_of_stopped(config: &ClusterConfig, store: &Store) -> Vec<Value> {
    match PeerClient::of_stopped(config) {
        Ok(client) => {
            let viewpoint = Viewpoint {
                own_id: None,
                config,
                client: &client,
            };
            checks(&viewpoint, store.cluster_health().await).await
        }
        Err(error) => vec![check_result(
            "cluster",
            CheckImportance::Essential,
            false,
            error.message,
            "correct the [cluster] section",
        )],
    }
}

async fn checks(viewpoint: &Viewpoint<'_>, health: Result<Option<ClusterHealth>>) -> Vec<Value> {
    let health = match health {
        Ok(Some(health)) => health,
        Ok(None) => return Vec::new(),
        Err(error) => {
            let remedy = "see the check of the database; the server's log may tell more";
            return vec![check_result(
                "cluster",
                CheckImportance::Essential,
                false,
                error.message,
                remedy,
            )];
        }
    };
    let mut found = vec![check_members(viewpoint, &health), check_own_clock(&health)];
    found.extend(check_versions(&health.servers));
    for servers in health.servers.chunks(PROBES_AT_ONCE) {
        let asked = servers.iter().map(|server| PeerServer {
            server_id: server.server_id.clone(),
            address: server.address.clone(),
        });
        let answers = join_all(asked.map(|peer| viewpoint.client.probe(peer))).await;
        for (server, answer) in servers.iter().zip(&answers) {
            found.extend(check_server(viewpoint, server, answer));
        }
    }
    found
}

/// How many servers there are, and whether their key is this one's.
fn check_members(viewpoint: &Viewpoint<'_>, health: &ClusterHealth) -> Value {
    let own_fingerprint = viewpoint
        .config
        .store_options()
        .map(|options| options.key_fingerprint);
    let same_key = match (&health.key_fingerprint, own_fingerprint) {
        // With no server left the key may change.
        (Some(known), Ok(own)) => *known == own || health.servers.is_empty(),
        (None, _) => true,
        (Some(_), Err(_)) => false,
    };
    let count = match health.servers.len() {
        1 => "1 server".to_owned(),
        many => format!("{many} servers"),
    };
    let detail = match (same_key, viewpoint.own_id) {
        (false, _) => "the servers that share the database have another cluster key".to_owned(),
        (true, Some(id)) => format!("{count}, this one is {id}"),
        (true, None) => format!("{count}, this one is stopped"),
    };
    let remedy = format!(
        "put the same key into {} of every server; to change the key, stop all of them first",
        viewpoint.config.key_env
    );
    check_result("cluster", CheckImportance::Essential, same_key, detail, &remedy)
}

/// Whether this machine's clock agrees with the database's.
fn check_own_clock(health: &ClusterHealth) -> Value {
    clock_result("clock", health.clock_ahead_ms, "this machine")
}

fn clock_result(name: &str, ahead_ms: i64, whose: &str) -> Value {
    let detail = match ahead_ms {
        0.. => format!("{} ahead of the database's", shown_millis(ahead_ms)),
        _ => format!("{} behind the database's", shown_millis(-ahead_ms)),
    };
    let remedy = format!(
        "synchronise the clock of {whose} (NTP), or the database's if all differ from it; times in logs of servers do not compare until then"
    );
    let ok = ahead_ms.abs() <= MAX_CLOCK_DIFFERENCE_MS;
    check_result(name, CheckImportance::Optional, ok, detail, &remedy)
}

fn shown_millis(millis: i64) -> String {
    match millis {
        ..10_000 => format!("{millis} ms"),
        _ => format!("{} s", millis / 1000),
    }
}

/// Says so when servers of several versions run, as they do during an upgrade.
fn check_versions(servers: &[ServerHealth]) -> Option<Value> {
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for server in servers {
        versions.entry(&server.version).or_default().push(&server.address);
    }
    if versions.len() < 2 {
        return None;
    }
    let shown = versions
        .iter()
        .map(|(version, addresses)| format!("{version} at {}", addresses.join(", ")));
    Some(check_result(
        "cluster versions",
        CheckImportance::Optional,
        false,
        shown.collect::<Vec<_>>().join("; "),
        "upgrade the older servers, one after another",
    ))
}

/// One server: whether it is heard of, and reached from here; and its clock.
fn check_server(viewpoint: &Viewpoint<'_>, server: &ServerHealth, probe: &ProbeOutcome) -> Vec<Value> {
    let is_this = viewpoint.own_id == Some(&server.server_id);
    let name = format!("server {}", server.address);
    let heard = match server.silent_for {
        silent if silent <= MAX_SILENCE => format!("seen {} s ago", silent.as_secs()),
        silent => format!("not heard of for {} s", silent.as_secs()),
    };
    let whose = match is_this {
        true => "this one, ",
        false => "",
    };
    let detail = format!(
        "{whose}version {} on {}, {heard}, {probe}",
        server.version, server.host
    );
    let remedy = match probe {
        ProbeOutcome::Unreachable(_) | ProbeOutcome::NoServer(_) | ProbeOutcome::OtherServer if is_this => format!(
            "correct [cluster] advertise of this server, or what stands between: the other servers reach it at {} alone",
            server.address
        ),
        ProbeOutcome::Unreachable(why) if why.to_ascii_lowercase().contains("certificate") => {
            "give that server a certificate for the host of its advertise, and name the authority that signed it in [cluster] ca_file here".to_owned()
        }
        ProbeOutcome::Unreachable(_) | ProbeOutcome::NoServer(_) => {
            "see that it runs and that its advertise is an address that is reached from here; a server that is gone disappears after 8 s".to_owned()
        }
        ProbeOutcome::OtherServer => {
            "give every server an advertise of its own; after a restart of that server this passes within 8 s".to_owned()
        }
        ProbeOutcome::OtherKey => format!(
            "put the same key into {} of both servers and start them again",
            viewpoint.config.key_env
        ),
        ProbeOutcome::Reached(_) => "see the log of that server: the others take over what it runs after 8 s".to_owned(),
    };
    let ok = matches!(probe, ProbeOutcome::Reached(_)) && server.silent_for <= MAX_SILENCE;
    let mut found = vec![check_result(
        &name,
        CheckImportance::Essential,
        ok,
        detail,
        &remedy,
    )];
    // This machine's own was measured just now.
    if let (false, Some(ahead)) = (is_this, server.clock_ahead_ms) {
        let name = format!("clock of {}", server.address);
        found.push(clock_result(&name, ahead, &server.host));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_differ_are_named_with_the_machine() {
        let good = clock_result("clock", -1_500, "this machine");
        assert_eq!(
            (&good["ok"], &good["detail"]),
            (&true.into(), &"1500 ms behind the database's".into())
        );
        let bad = clock_result("clock of a", 3_600_000, "host-a");
        assert_eq!(bad["detail"], "3600 s ahead of the database's");
        assert!(
            bad["remedy"]
                .as_str()
                .is_some_and(|remedy| remedy.contains("host-a"))
        );
        assert_eq!(bad["essential"], false);
    }
}
