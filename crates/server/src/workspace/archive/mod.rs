//! A workspace as a tar.gz archive that is made while it is sent.
//!
//! The archive is made a chunk at a time, when the client has taken the one before ([`packer`]). A client that reads
//! slowly, or not at all, so holds no thread; it does hold a place among the downloads, and loses it when it takes
//! nothing for a while.

mod packer;
pub(crate) mod places;
pub(crate) mod reader;

use std::{
    io,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures::Stream;
use oubliette_protocol::{Result, WorkspaceId};
use parking_lot::Mutex;
use tokio::{
    task::{AbortHandle, JoinHandle},
    time::Instant,
};

use self::{
    packer::{ArchivePacker, PackedStep},
    places::{TransferPlace, TransferPlaces},
};
use super::files;

/// How long a client may take nothing before its download is given up.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The downloads in progress. Clones share one count.
#[derive(Clone)]
pub(crate) struct ArchiveDownloads(TransferPlaces);

impl Default for ArchiveDownloads {
    fn default() -> Self {
        Self(TransferPlaces::new("read"))
    }
}

impl ArchiveDownloads {
    /// Starts to pack a workspace. The stream yields the archive in chunks, as fast as they are read. An error ends it
    /// early, which gzip readers detect.
    pub(crate) fn pack(&self, workspace: &WorkspaceId, dir: &Path) -> Result<ArchiveStream> {
        let place = self.0.take_place(workspace)?;
        let root = files::open_root_for_reading(dir)?;
        let packer = ArchivePacker::new(root);
        Ok(ArchiveStream::new(packer, place))
    }
}

/// An archive on its way to a client.
pub(crate) struct ArchiveStream {
    waiting: Arc<Mutex<WaitingDownload>>,
    step: Option<JoinHandle<(Box<ArchivePacker>, io::Result<PackedStep>)>>,
    watch: AbortHandle,
}

/// A download of which the client has not taken the last chunk yet.
struct WaitingDownload {
    /// None while a step of packing is in progress, and at the end.
    packer: Option<Box<ArchivePacker>>,
    /// None at the end.
    place: Option<TransferPlace>,
    since: Instant,
}

impl ArchiveStream {
    fn new(packer: ArchivePacker, place: TransferPlace) -> Self {
        let waiting = Arc::new(Mutex::new(WaitingDownload {
            packer: Some(Box::new(packer)),
            place: Some(place),
            since: Instant::now(),
        }));
        let watch = tokio::spawn(give_up_when_stalled(waiting.clone())).abort_handle();
        Self {
            waiting,
            step: None,
            watch,
        }
    }
}

/// Gives up a download of which nothing is taken: its files are closed and its place is free, though the connection may
/// stay open.
async fn give_up_when_stalled(waiting: Arc<Mutex<WaitingDownload>>) {
    loop {
        let until = waiting.lock().since + STALL_TIMEOUT;
        tokio::time::sleep_until(until).await;
        let mut waiting = waiting.lock();
        if waiting.place.is_none() {
            return;
        }
        if waiting.packer.is_none() {
            // It is being packed, so nobody has to take anything.
            waiting.since = Instant::now();
        } else if waiting.since.elapsed() >= STALL_TIMEOUT {
            waiting.packer = None;
            waiting.place = None;
            return;
        }
    }
}

impl Stream for ArchiveStream {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let this = self.get_mut();
        loop {
            let step = match &mut this.step {
                Some(step) => step,
                None => {
                    let mut waiting = this.waiting.lock();
                    let Some(mut packer) = waiting.packer.take() else {
                        return Poll::Ready(match waiting.place {
                            Some(_) => None,
                            None => Some(Err(io::ErrorKind::TimedOut.into())),
                        });
                    };
                    this.step.insert(tokio::task::spawn_blocking(move || {
                        let step = packer.step();
                        (packer, step)
                    }))
                }
            };
            let done = ready!(Pin::new(step).poll(cx));
            this.step = None;
            let mut waiting = this.waiting.lock();
            waiting.since = Instant::now();
            match done {
                Ok((packer, Ok(PackedStep::Chunk(chunk)))) => {
                    waiting.packer = Some(packer);
                    if !chunk.is_empty() {
                        return Poll::Ready(Some(Ok(chunk)));
                    }
                }
                Ok((_, Ok(PackedStep::Last(chunk)))) => return Poll::Ready(Some(Ok(chunk))),
                Ok((_, Err(error))) => return Poll::Ready(Some(Err(error))),
                Err(error) => return Poll::Ready(Some(Err(io::Error::other(error)))),
            }
        }
    }
}

impl Drop for ArchiveStream {
    fn drop(&mut self) {
        self.watch.abort();
        // Not left to the watching task, which may end later.
        let mut waiting = self.waiting.lock();
        waiting.packer = None;
        waiting.place = None;
    }
}

#[cfg(test)]
mod tests;
