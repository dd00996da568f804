//! Whatever the other end passes, it is closed by the worker and by nobody else. The worker is kept busy meanwhile, so
//! that what it has not closed yet is still open.

use std::{
    io::{IoSlice, PipeReader},
    mem::MaybeUninit,
    os::unix::net::UnixStream,
    sync::mpsc,
};

use rustix::net::{SendAncillaryMessage, SocketType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::{PassedDescriptors, UntrustedListener};

/// A worker that does nothing until it is released.
struct BusyWorker {
    worker: DescriptorWorker,
    release: mpsc::Sender<()>,
}

impl BusyWorker {
    fn new() -> Self {
        let worker = DescriptorWorker::default();
        let (release, released) = mpsc::channel::<()>();
        // Queued before this returns: a spawned task would run at the test's next await, after what it should hold up.
        worker.submit(Box::new(move || {
            let _ = released.recv();
        }));
        Self { worker, release }
    }

    /// Checks that a pipe's other end is open now, and closed once the worker was released.
    async fn closes(self, pipe: PipeReader) {
        rustix::io::ioctl_fionbio(&pipe, true).unwrap();
        let read = || rustix::io::read(&pipe, &mut [0; 1]);
        assert_eq!(read(), Err(rustix::io::Errno::AGAIN), "it was closed here");
        drop(self.release);
        self.worker.run(|| ()).await.unwrap();
        assert_eq!(read(), Ok(0), "it was not closed");
    }
}

/// Sends bytes and, with them, the writing end of a pipe; returns its reading end.
fn pass(socket: &UnixStream, bytes: &[u8], flags: SendFlags) -> rustix::io::Result<PipeReader> {
    let (reader, writer) = io::pipe().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let passed = [std::os::fd::AsFd::as_fd(&writer)];
    control.push(SendAncillaryMessage::ScmRights(&passed));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(reader)
}

fn pair(worker: &DescriptorWorker) -> (UntrustedSocket, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    (UntrustedSocket::new(ours.into(), worker.clone()), theirs)
}

#[tokio::test]
async fn a_descriptor_ends_the_connection_it_came_over() {
    for (before, flags) in [
        (&b""[..], SendFlags::empty()),
        (b"bytes", SendFlags::empty()),
        (b"", SendFlags::OOB),
    ] {
        let busy = BusyWorker::new();
        let (ours, theirs) = pair(&busy.worker);
        let mut stream = UntrustedStream::new(ours).unwrap();
        rustix::net::send(&theirs, before, SendFlags::empty()).unwrap();
        let pipe = pass(&theirs, b"x", flags).unwrap();
        let mut bytes = Vec::new();
        let error = stream.read_to_end(&mut bytes).await.unwrap_err();
        assert!(error.to_string().contains("passed a descriptor"), "{error}");
        drop(stream);
        busy.closes(pipe).await;
    }
}

#[tokio::test]
async fn descriptors_still_queued_are_not_closed_with_the_socket() {
    for flags in [SendFlags::empty(), SendFlags::OOB] {
        let busy = BusyWorker::new();
        let (ours, theirs) = pair(&busy.worker);
        let pipe = pass(&theirs, b"x", flags).unwrap();
        drop(UntrustedStream::new(ours).unwrap());
        busy.closes(pipe).await;
    }
    // Of a connection that nobody accepted.
    let busy = BusyWorker::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.sock");
    let listener = UntrustedListener::bind(&path, PassedDescriptors::Expected, busy.worker.clone()).unwrap();
    let pipe = pass(&UnixStream::connect(&path).unwrap(), b"x", SendFlags::empty()).unwrap();
    drop(listener);
    busy.closes(pipe).await;
}

#[tokio::test]
async fn a_shared_socket_is_read_and_closed_likewise() {
    let busy = BusyWorker::new();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let ours = UntrustedDescriptor::new(ours.into(), busy.worker.clone());
    let mut shared = SharedSocket::new(ours, Interest::READABLE).unwrap();
    let first = pass(&theirs, b"x", SendFlags::empty()).unwrap();
    let second = pass(&theirs, b"x", SendFlags::empty()).unwrap();
    assert!(shared.read_u8().await.is_err());
    drop(shared);
    let worker = busy.worker.clone();
    busy.closes(first).await;
    worker.run(|| ()).await.unwrap();
    assert_eq!(rustix::io::read(&second, &mut [0; 1]), Ok(0));
}

#[tokio::test]
async fn expected_descriptors_are_received() {
    let worker = DescriptorWorker::default();
    let (ours, theirs) = pair(&worker);
    let mut stream = UntrustedStream::new(ours).unwrap();
    let pipe = pass(&theirs, b"take this", SendFlags::empty()).unwrap();
    let (bytes, descriptors) = stream.receive(64).await.unwrap();
    assert_eq!((&*bytes, descriptors.len()), (&b"take this"[..], 1));
    rustix::io::write(&descriptors[0], b"y").unwrap();
    assert_eq!(rustix::io::read(&pipe, &mut [0; 2]), Ok(1));
}

#[tokio::test]
async fn a_listener_that_refuses_descriptors_takes_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.sock");
    let worker = DescriptorWorker::default();
    let listener = UntrustedListener::bind(&path, PassedDescriptors::Refused, worker).unwrap();
    let theirs = UnixStream::connect(&path).unwrap();
    let passed = pass(&theirs, b"x", SendFlags::NOSIGNAL);
    let mut stream = UntrustedStream::new(listener.accept().await.unwrap()).unwrap();
    match passed {
        // The kernel refused it, and the connection goes on.
        Err(error) => {
            assert_eq!(error, rustix::io::Errno::PERM);
            rustix::net::send(&theirs, b"y", SendFlags::empty()).unwrap();
            assert_eq!(stream.read_u8().await.unwrap(), b'y');
        }
        // A kernel before 6.16.
        Ok(_) => assert!(stream.read_u8().await.is_err()),
    }
}

#[tokio::test]
async fn a_listener_replaces_a_leftover_and_has_mode_0600() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.sock");
    let bind = || UntrustedListener::bind(&path, PassedDescriptors::Refused, DescriptorWorker::default());
    drop(bind().unwrap());
    assert!(path.exists(), "a dropped listener leaves its file");
    assert!(UnixStream::connect(&path).is_err(), "nobody listens any more");
    let _again = bind().unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn only_stream_sockets_can_connect() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.sock");
    let _listener =
        UntrustedListener::bind(&path, PassedDescriptors::Refused, DescriptorWorker::default()).unwrap();
    for kind in [SocketType::SEQPACKET, SocketType::DGRAM] {
        let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).unwrap();
        let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
        assert!(rustix::net::connect(&socket, &address).is_err());
    }
}

#[tokio::test]
async fn everything_arrives_though_the_stream_is_full_again_and_again() {
    let worker = DescriptorWorker::default();
    let (ours, theirs) = pair(&worker);
    theirs.set_nonblocking(true).unwrap();
    let theirs = UntrustedSocket::new(theirs.into(), worker);
    let (_reading, mut writing) = UntrustedStream::new(ours).unwrap().into_split();
    let (mut reading, _writing) = UntrustedStream::new(theirs).unwrap().into_split();
    let sent: Vec<u8> = (0..5_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let want = sent.clone();
    let writer = tokio::spawn(async move {
        writing.write_all(&sent).await.unwrap();
        assert!(writing.writable.is_none(), "it is no longer watched");
        writing.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    reading.read_to_end(&mut got).await.unwrap();
    writer.await.unwrap();
    assert!(got == want);
}

#[tokio::test]
async fn a_blocked_writer_fails_when_the_other_end_closes() {
    let (ours, theirs) = pair(&DescriptorWorker::default());
    let (_reading, mut writing) = UntrustedStream::new(ours).unwrap().into_split();
    let writer = tokio::spawn(async move { writing.write_all(&vec![0; 10_000_000]).await });
    theirs.set_nonblocking(true).unwrap();
    let mut theirs = tokio::net::UnixStream::from_std(theirs).unwrap();
    theirs.read_exact(&mut [0; 100_000]).await.unwrap();
    drop(theirs);
    assert!(writer.await.unwrap().is_err());
}
