//! Tells the service manager (systemd) how the server is, as sd_notify(3) describes: one datagram a message, to the
//! socket that `NOTIFY_SOCKET` names. Without it nothing is sent.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
    sync::Arc,
    time::Duration,
};

use crate::{app::App, config::EnvLookup};

/// The socket of the service manager, and how often it wants to hear of the server.
#[derive(Debug)]
pub(crate) struct ServiceManager {
    socket: UnixDatagram,
    address: SocketAddr,
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// The service manager that started this process; none if no service manager did, or its socket cannot be used.
    pub(crate) fn from_env(env: EnvLookup<'_>) -> Option<Self> {
        let named = env("NOTIFY_SOCKET").filter(|name| !name.is_empty())?;
        let opened = || -> io::Result<_> {
            let address = match named.strip_prefix('@') {
                Some(name) => SocketAddr::from_abstract_name(name)?,
                None => SocketAddr::from_pathname(&named)?,
            };
            let socket = UnixDatagram::unbound()?;
            // A service manager that does not read must not hold the server up.
            socket.set_nonblocking(true)?;
            Ok((socket, address))
        };
        match opened() {
            Ok((socket, address)) => Some(Self {
                socket,
                address,
                watchdog: watchdog_timeout(env, std::process::id()),
            }),
            Err(error) => {
                tracing::warn!(%error, "NOTIFY_SOCKET cannot be used; the service manager is told nothing");
                None
            }
        }
    }

    /// The server takes requests at `url`.
    pub(crate) fn ready(&self, url: &str) {
        self.send(&format!("READY=1\nSTATUS=Serving {url}/"));
    }

    /// The server is about to end.
    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=Finishing requests in flight");
    }

    /// Says that the server is alive, twice in each timeout of the watchdog, as long as its runtime and its database
    /// answer. A database that answers with an error is alive: a restart would not repair it.
    pub(crate) async fn keep_watchdog_quiet(&self, app: &Arc<App>) {
        let Some(timeout) = self.watchdog else {
            return std::future::pending().await;
        };
        let mut ticks = tokio::time::interval(timeout / 2);
        loop {
            ticks.tick().await;
            if tokio::time::timeout(timeout / 2, app.store.healthy())
                .await
                .is_ok()
            {
                self.send("WATCHDOG=1");
            }
        }
    }

    fn send(&self, message: &str) {
        if let Err(error) = self.socket.send_to_addr(message.as_bytes(), &self.address) {
            tracing::debug!(%error, "sending to NOTIFY_SOCKET failed");
        }
    }
}

/// The watchdog's timeout, if it watches this process.
fn watchdog_timeout(env: EnvLookup<'_>, pid: u32) -> Option<Duration> {
    let watched = env("WATCHDOG_PID").is_none_or(|watched| watched.parse() == Ok(pid));
    let microseconds: u64 = env("WATCHDOG_USEC")?.parse().ok()?;
    (watched && microseconds > 0).then(|| Duration::from_micros(microseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_go_to_the_named_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let receiver = UnixDatagram::bind(&path).unwrap();
        let manager = ServiceManager::from_env(&|name| {
            (name == "NOTIFY_SOCKET").then(|| path.to_string_lossy().into_owned())
        });
        manager.unwrap().ready("http://127.0.0.1:1");
        let mut buffer = [0; 200];
        let read = receiver.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..read], b"READY=1\nSTATUS=Serving http://127.0.0.1:1/");
    }

    #[test]
    fn the_watchdog_of_another_process_is_not_answered() {
        let env = |pid: &'static str| {
            move |name: &str| match name {
                "WATCHDOG_USEC" => Some("2000000".to_owned()),
                "WATCHDOG_PID" => Some(pid.to_owned()),
                _ => None,
            }
        };
        assert_eq!(watchdog_timeout(&env("7"), 7), Some(Duration::from_secs(2)));
        assert_eq!(watchdog_timeout(&env("7"), 8), None);
        assert_eq!(watchdog_timeout(&|_| None, 7), None);
    }
}
