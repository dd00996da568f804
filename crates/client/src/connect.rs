//! `oubliette-client connect PROXY HOST PORT`: stdin and stdout to a host, through an HTTP proxy (`CONNECT`).
//!
//! Git's ssh and `git://` transports use it in a sandbox, where the proxy is the only way to the network.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    process::ExitCode,
};

/// Maximum length of the proxy's response head, in bytes.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Maximum length of a refusal that is shown, in bytes.
const MAX_REFUSAL_BYTES: u64 = 4096;

/// Runs the subcommand with the arguments after `connect`.
pub(crate) fn main(args: impl Iterator<Item = String>) -> ExitCode {
    let args: Vec<String> = args.collect();
    let [proxy, host, port] = args.as_slice() else {
        eprintln!("oubliette-client: usage: oubliette-client connect PROXY:PORT HOST PORT");
        return ExitCode::from(2);
    };
    match connect(proxy, host, port).and_then(copy_both_ways) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("oubliette-client: {host}:{port}: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Connects to the proxy and asks it for a tunnel.
fn connect(proxy: &str, host: &str, port: &str) -> io::Result<TcpStream> {
    let proxy: SocketAddr = proxy.parse().map_err(io::Error::other)?;
    let port: u16 = port.parse().map_err(io::Error::other)?;
    let mut stream = TcpStream::connect(proxy)?;
    stream.write_all(request(host, port)?.as_bytes())?;
    let head = read_head(&mut stream)?;
    if is_success(&head) {
        return Ok(stream);
    }
    let mut body = Vec::new();
    // Not to the end of the stream: the proxy keeps the connection open for a next request.
    let length = content_length(&head).min(MAX_REFUSAL_BYTES);
    let _ = stream.take(length).read_to_end(&mut body);
    let status = head.lines().next().unwrap_or_default();
    let body = String::from_utf8_lossy(&body);
    Err(io::Error::other(format!("the proxy answered {status}: {body}")))
}

fn request(host: &str, port: u16) -> io::Result<String> {
    let host = host.trim_matches(['[', ']']);
    if host.is_empty()
        || !host
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-._:".contains(&b))
    {
        return Err(io::Error::other("this is not a host"));
    }
    let target = if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    Ok(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"))
}

/// Reads the response head, and not a byte of the tunnel that follows it.
fn read_head(stream: &mut impl Read) -> io::Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == MAX_HEAD_BYTES {
            return Err(io::Error::other("the proxy's answer is too long"));
        }
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

fn is_success(head: &str) -> bool {
    head.starts_with("HTTP/1.") && head.split(' ').nth(1).is_some_and(|code| code.starts_with('2'))
}

fn content_length(head: &str) -> u64 {
    head.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

/// Copies until the other side ends. The end of stdin is passed on.
fn copy_both_ways(stream: TcpStream) -> io::Result<()> {
    let mut sending = stream.try_clone()?;
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut sending);
        let _ = sending.shutdown(Shutdown::Write);
    });
    let mut receiving = stream;
    let mut out = io::stdout().lock();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match receiving.read(&mut buffer)? {
            0 => return Ok(()),
            read => {
                // Stdout is buffered by line, and the protocols have none.
                out.write_all(&buffer[..read])?;
                out.flush()?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_names_its_target_once() {
        assert_eq!(
            request("h.example", 22).unwrap(),
            "CONNECT h.example:22 HTTP/1.1\r\nHost: h.example:22\r\n\r\n"
        );
        assert!(request("::1", 22).unwrap().starts_with("CONNECT [::1]:22 "));
        assert!(request("h\r\nX: y", 22).is_err() && request("", 22).is_err());
    }

    #[test]
    fn a_head_is_read_without_the_tunnel() {
        let mut stream = io::Cursor::new(b"HTTP/1.1 200 OK\r\n\r\nSSH-2.0".to_vec());
        assert!(is_success(&read_head(&mut stream).unwrap()));
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "SSH-2.0");
        assert!(!is_success("HTTP/1.1 403 Forbidden\r\n\r\n"));
        assert_eq!(content_length("HTTP/1.1 403 x\r\nContent-Length: 12\r\n\r\n"), 12);
        assert_eq!(content_length("HTTP/1.1 403 x\r\n\r\n"), 0);
        assert!(read_head(&mut io::repeat(b'x')).is_err());
    }
}
