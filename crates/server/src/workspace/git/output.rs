//! Reading what a git script prints, until it ends.

use oubliette_protocol::Error;
use oubliette_sandbox::{RunningSandbox, SandboxExit};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Maximum length of the stderr that is kept, in bytes.
const MAX_STDERR_BYTES: usize = 16 * 1024;
/// Size of the reads, in bytes: what a pipe holds.
const READ_BYTES: usize = 64 * 1024;

/// The variable of a script's environment that holds its end mark.
pub(super) const END_MARK_VARIABLE: &str = "OUBLIETTE_END_MARK";
/// Follows each script, which runs in a subshell: prints the end mark and the exit code on both streams.
pub(super) const PRINT_END_MARK: &str = r#"
    code=$?
    printf '\n%s %d\n' "$OUBLIETTE_END_MARK" "$code" >&2
    printf '\n%s %d\n' "$OUBLIETTE_END_MARK" "$code"
    exit "$code"
"#;

/// The text that ends both streams of a script. From it the end is known before the sandbox is taken down, which takes
/// as long as starting it. It is random, so that nothing in a workspace can pretend to be the end.
pub(super) struct EndMark(String);

impl EndMark {
    pub(super) fn new() -> Self {
        Self(uuid::Uuid::new_v4().simple().to_string())
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Length of the mark as it is printed, in bytes, with the longest exit code.
    fn printed_bytes(&self) -> usize {
        self.0.len() + "\n 255\n".len()
    }

    /// Takes the mark off the end of what was printed, if it is there; returns the exit code.
    fn strip(&self, printed: &mut Vec<u8>) -> Option<i32> {
        let line = printed.strip_suffix(b"\n")?;
        let from = line.len().saturating_sub(self.printed_bytes());
        let begin = from + line[from..].iter().rposition(|byte| *byte == b'\n')?;
        let line = std::str::from_utf8(&line[begin + 1..]).ok()?;
        let code = line.strip_prefix(self.text())?.strip_prefix(' ')?.parse().ok()?;
        printed.truncate(begin);
        Some(code)
    }
}

/// What to wait for before a successful script's output is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitFor {
    /// The script.
    Script,
    /// The end of its sandbox: nothing writes any more.
    Sandbox,
}

/// How a script ended and what it printed.
pub(super) struct GitOutput {
    exit: SandboxExit,
    pub(super) stdout: Vec<u8>,
    /// Whether stdout was longer than allowed; then git was stopped.
    pub(super) truncated: bool,
    pub(super) stderr: String,
}

impl GitOutput {
    /// Whether it succeeded, or was stopped only because of the length of its output.
    pub(super) fn success(&self) -> bool {
        self.truncated || self.exit.success()
    }

    pub(super) fn code(&self) -> Option<i32> {
        self.exit.code
    }

    /// Whether the kernel killed any of its processes because it ran out of memory.
    pub(super) fn out_of_memory(&self) -> bool {
        self.exit.oom
    }

    /// Whether it was refused a process or thread because it had as many as it may.
    pub(super) fn too_many_processes(&self) -> bool {
        self.exit.too_many_processes
    }

    /// Whether this signal ended it, or a command of the shell script.
    pub(super) fn ended_by(&self, signal: i32) -> bool {
        self.exit.signal == Some(signal) || self.exit.code == Some(128 + signal)
    }

    /// An error for a failure that no input explains.
    pub(super) fn failure(&self, what: &str) -> Error {
        let (exit, stderr) = (self.exit, self.stderr.trim());
        Error::unavailable(format!("git could not {what}: {exit}")).with_cause(format!("{exit}: {stderr}"))
    }
}

/// Reads the output of a script until its end.
pub(super) async fn read_output(
    running: RunningSandbox,
    max_stdout: usize,
    end_mark: &EndMark,
    wait: WaitFor,
) -> GitOutput {
    let RunningSandbox {
        stdin,
        stdout,
        mut stderr,
        handle,
        ..
    } = running;
    drop(stdin);
    let out = async {
        let read = read_stream(stdout, max_stdout, end_mark).await;
        if read.truncated {
            handle.kill();
        }
        read
    };
    let err = async {
        let read = read_stream(&mut stderr, MAX_STDERR_BYTES, end_mark).await;
        if read.truncated {
            // The rest is read and dropped, so that git does not wait for a full pipe.
            let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
        }
        read
    };
    let printed = async { tokio::join!(out, err) };
    let exit = async {
        let exit = handle.wait().await;
        // Whatever it left behind would keep the pipes open.
        handle.kill();
        exit
    };
    tokio::pin!(printed, exit);
    let (known, (out, err)) = tokio::select! {
        biased;
        printed = &mut printed => (None, printed),
        exit = &mut exit => (Some(exit), printed.await),
    };
    let exit = match known {
        Some(exit) => exit,
        // Why it failed, such as for want of memory, is known when the sandbox has ended.
        None if wait == WaitFor::Script && out.code == Some(0) => SandboxExit {
            code: Some(0),
            signal: None,
            oom: false,
            too_many_processes: false,
            cause: None,
        },
        None => exit.await,
    };
    GitOutput {
        exit,
        stdout: out.bytes,
        truncated: out.truncated,
        stderr: String::from_utf8_lossy(&err.bytes).into_owned(),
    }
}

/// What was read of a stream.
struct StreamOutput {
    bytes: Vec<u8>,
    /// Whether there was more than allowed.
    truncated: bool,
    /// The exit code of the end mark, if that was reached.
    code: Option<i32>,
}

/// Reads until the end mark, the end of the stream, or more than `max` bytes.
async fn read_stream(mut stream: impl AsyncRead + Unpin, max: usize, end_mark: &EndMark) -> StreamOutput {
    let mut bytes = Vec::new();
    let mut code = None;
    while code.is_none() && bytes.len() <= max + end_mark.printed_bytes() {
        bytes.reserve(READ_BYTES);
        match stream.read_buf(&mut bytes).await {
            Ok(0) | Err(_) => break,
            Ok(_) => code = end_mark.strip(&mut bytes),
        }
    }
    let truncated = bytes.len() > max;
    bytes.truncate(max);
    StreamOutput {
        bytes,
        truncated,
        code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stream_is_read_to_its_end_mark_and_no_further_than_allowed() {
        let end_mark = EndMark::new();
        let printed = |text: &str, code: i32| format!("{text}\n{} {code}\n", end_mark.text());
        for (text, stream, max, kept, truncated, code) in [
            ("empty", printed("", 0), 9, "", false, Some(0)),
            ("text", printed("text\n", 255), 9, "text\n", false, Some(255)),
            (
                "as long as allowed",
                printed("123456789", 0),
                9,
                "123456789",
                false,
                Some(0),
            ),
            ("longer", printed("1234567890", 0), 9, "123456789", true, Some(0)),
            ("no mark", "text\n".to_owned(), 9, "text\n", false, None),
            ("far too long", "x".repeat(200_000), 9, "xxxxxxxxx", true, None),
        ] {
            let read = read_stream(stream.as_bytes(), max, &end_mark).await;
            assert_eq!(String::from_utf8_lossy(&read.bytes), kept, "{text}");
            assert_eq!((read.truncated, read.code), (truncated, code), "{text}");
        }
        // Another run's mark is text.
        let other = EndMark::new();
        let stream = format!("\n{} 0\n", other.text());
        let read = read_stream(stream.as_bytes(), 99, &end_mark).await;
        assert_eq!(read.code, None);
        assert_eq!(read.bytes, stream.as_bytes());
    }
}
