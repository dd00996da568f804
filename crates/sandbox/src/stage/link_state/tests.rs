//! Tests of [`super`].

use super::*;
use bytes::BytesMut;

/// Carries what one end has to write to the other; `cut_after` bytes the connection breaks.
fn carry(from: &mut LinkState, to: &mut LinkState, cut_after: usize) -> Result<(), LinkViolation> {
    let mut wire = Vec::new();
    from.take_output(usize::MAX, &mut wire);
    wire.truncate(cut_after);
    let mut buffer = BytesMut::from(&wire[..]);
    while let Some(frame) = Frame::decode(&mut buffer)? {
        to.receive(frame)?;
    }
    Ok(())
}

fn reconnect(one: &mut LinkState, other: &mut LinkState) {
    let (a, b) = (one.received(), other.received());
    one.resume(b).unwrap();
    other.resume(a).unwrap();
}

#[test]
fn whatever_is_cut_arrives_once_and_in_order() {
    let sent: Vec<u8> = (0..200_000_u32).map(|n| (n % 251) as u8).collect();
    // Cuts at the beginning, within headers, within data.
    for cut in [0, 3, 17, 18, 26, 500, 40_000, 70_000] {
        let (mut container, mut server) = (
            LinkState::new(LinkEnd::Container),
            LinkState::new(LinkEnd::Server),
        );
        let (mut rest, mut got) = (&sent[..], Vec::new());
        for round in 0..400 {
            while let StreamWrite::Taken(taken) = container.write(stream_id::STDOUT, rest).unwrap() {
                rest = &rest[taken..];
            }
            let limit = if round % 2 == 0 { cut } else { usize::MAX };
            carry(&mut container, &mut server, limit).unwrap();
            while let StreamRead::Data(bytes) = server.read(stream_id::STDOUT).unwrap() {
                got.extend_from_slice(&bytes);
            }
            if round % 3 == 0 {
                carry(&mut server, &mut container, limit).unwrap();
            }
            reconnect(&mut container, &mut server);
        }
        assert!(
            rest.is_empty() && got == sent,
            "cut after {cut}: {} bytes",
            got.len()
        );
    }
}

#[test]
fn what_is_under_way_is_bounded_stream_by_stream() {
    let mut container = LinkState::new(LinkEnd::Container);
    let mut written = 0;
    while let StreamWrite::Taken(taken) = container.write(stream_id::STDOUT, &[1; 100_000]).unwrap() {
        written += taken;
    }
    assert_eq!(written, STDIO_WINDOW);
    // Another stream is not held up.
    assert_eq!(
        container.write(stream_id::STDERR, b"x").unwrap(),
        StreamWrite::Taken(1)
    );
    // Data beyond the credit is a violation.
    let mut server = LinkState::new(LinkEnd::Server);
    carry(&mut container, &mut server, usize::MAX).unwrap();
    let more = Frame::Data {
        stream: stream_id::STDOUT,
        bytes: Bytes::from_static(b"more"),
    };
    assert!(server.receive(more).is_err());
}

#[test]
fn streams_are_bounded_and_a_lie_ends_the_link() {
    let mut server = LinkState::new(LinkEnd::Server);
    for n in 0..MAX_SOCKET_STREAMS as u32 + 10 {
        let open = Frame::Open {
            stream: stream_id::FIRST_SOCKET + n,
            socket: 0,
        };
        server.receive(open).unwrap();
    }
    assert_eq!(server.socket_streams(), MAX_SOCKET_STREAMS);
    assert_eq!(server.unacknowledged.len(), 10, "the others are reset");
    for lie in [
        Frame::Open { stream: 4, socket: 0 },
        Frame::Data {
            stream: 9_999,
            bytes: Bytes::from_static(b"x"),
        },
        Frame::Credit { stream: 1, bytes: 1 },
        Frame::Ack { received: 1_000_000 },
    ] {
        assert!(server.receive(lie.clone()).is_err(), "{lie:?}");
    }
    let mut container = LinkState::new(LinkEnd::Container);
    assert!(container.receive(Frame::Open { stream: 4, socket: 0 }).is_err());
    assert!(container.resume(5).is_err(), "more than was ever sent");
}

#[test]
fn an_end_that_never_acknowledges_is_noticed() {
    let mut server = LinkState::new(LinkEnd::Server);
    let mut rounds = 0;
    let violation = loop {
        rounds += 1;
        assert!(rounds < 1_000_000, "it is noticed");
        let half = Frame::Data {
            stream: stream_id::STDOUT,
            bytes: Bytes::from(vec![0; MAX_PAYLOAD]),
        };
        server.receive(half).unwrap();
        if let Err(violation) = server.read(stream_id::STDOUT) {
            break violation;
        }
    };
    assert_eq!(violation, LinkViolation("nothing is acknowledged"));
}

#[test]
fn frames_of_a_byte_each_take_no_more_than_their_bytes() {
    let mut server = LinkState::new(LinkEnd::Server);
    for n in 0..STDIO_WINDOW {
        let byte = Frame::Data {
            stream: stream_id::STDOUT,
            bytes: Bytes::from(vec![n as u8]),
        };
        server.receive(byte).unwrap();
    }
    let kept = &server.streams[&stream_id::STDOUT].incoming;
    assert!(kept.capacity() <= 2 * STDIO_WINDOW, "{} bytes", kept.capacity());
    let StreamRead::Data(bytes) = server.read(stream_id::STDOUT).unwrap() else {
        panic!("nothing was received")
    };
    assert_eq!(bytes.len(), STDIO_WINDOW);
    assert!(bytes.iter().enumerate().all(|(n, byte)| *byte == n as u8));
}

#[test]
fn an_end_that_gives_credit_for_what_it_does_not_acknowledge_is_noticed() {
    let mut server = LinkState::new(LinkEnd::Server);
    let violation = loop {
        match server.write(stream_id::STDIN, &[0; MAX_PAYLOAD]) {
            Ok(StreamWrite::Taken(_)) => {}
            Ok(_) => {
                let bytes = STDIO_WINDOW as u32;
                let stream = stream_id::STDIN;
                server.receive(Frame::Credit { stream, bytes }).unwrap();
            }
            Err(violation) => break violation,
        }
    };
    assert_eq!(violation, LinkViolation("nothing is acknowledged"));
    let kept: usize = server.unacknowledged.iter().map(|frame| frame.len()).sum();
    assert!(kept <= MAX_UNACKNOWLEDGED_BYTES, "{kept} bytes");
}

#[test]
fn ends_and_resets_arrive_after_the_data_before_them() {
    let (mut container, mut server) = (
        LinkState::new(LinkEnd::Container),
        LinkState::new(LinkEnd::Server),
    );
    let stream = container.open(3).unwrap().unwrap();
    container.write(stream, b"hello").unwrap();
    container.finish(stream).unwrap();
    carry(&mut container, &mut server, usize::MAX).unwrap();
    assert_eq!(server.accept(), Some((stream, 3)));
    assert_eq!(
        server.read(stream).unwrap(),
        StreamRead::Data(Bytes::from_static(b"hello"))
    );
    assert_eq!(server.read(stream).unwrap(), StreamRead::End);
    server.close(stream).unwrap();
    carry(&mut server, &mut container, usize::MAX).unwrap();
    assert_eq!(container.read(stream).unwrap(), StreamRead::Reset);
    assert_eq!(container.write(stream, b"x").unwrap(), StreamWrite::Reset);
    container.close(stream).unwrap();
    assert!(container.is_flushed() || container.socket_streams() == 0);
}
