//! A way to the server that can be cut: what a network does to a client.

use std::net::SocketAddr;

use anyhow::Result;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// Forwards connections to a port on loopback until they are cut.
pub struct Link {
    address: SocketAddr,
    cuts: watch::Sender<u64>,
    accepting: JoinHandle<()>,
}

impl Link {
    /// To this port.
    pub async fn to(port: u16) -> Result<Self> {
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

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Cuts every connection; new ones work.
    pub fn cut(&self) {
        self.cuts.send_modify(|n| *n += 1);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}
