//! A TCP proxy whose connections a test can cut, to simulate a failing network.

use std::net::SocketAddr;

use anyhow::Result;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// Forwards connections to a port on loopback until they are cut.
pub struct CuttableProxy {
    address: SocketAddr,
    cuts: watch::Sender<u64>,
    accepting: JoinHandle<()>,
}

impl CuttableProxy {
    /// Starts a proxy to this port on loopback.
    pub async fn forward_to(port: u16) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (cuts, _) = watch::channel(0);
        let told = cuts.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut cut = told.subscribe();
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(("127.0.0.1", port)).await else {
                        return;
                    };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Ok(Self {
            address,
            cuts,
            accepting,
        })
    }

    /// The URL of the proxy.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Cuts every connection; new ones work.
    pub fn cut_connections(&self) {
        self.cuts.send_modify(|n| *n += 1);
    }
}

impl Drop for CuttableProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}
