//! `oubliette logs`: the log of the server of this machine, from the file or the journal that its standard error goes to.

use std::{
    fs::File,
    io::{Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use jiff::Timestamp;
use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result, duration::HumanDuration};
use serde_json::json;
use tokio::{io::AsyncReadExt as _, net::UnixStream, process::Command};

use super::{
    CommandContext,
    log_lines::{LastLines, LogFilter, LogLevel, LogLineSplitter},
    output::{OutputFormat, try_print_line},
    style::strip_control_chars,
};

/// The unit that packages install.
const UNIT: &str = "oubliette.service";
/// How much of the end of a file is looked through, in bytes.
const MAX_READ_BYTES: u64 = 64 * 1024 * 1024;
/// How often a file is looked at for new lines.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

/// Arguments of `oubliette logs`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The log is where the server's standard error goes: the journal if systemd started it, else the file it was \
    redirected to.\n\nExamples:\n  oubliette logs --follow\n  oubliette logs --since 1h --level warn"
)]
pub(crate) struct LogsArgs {
    /// Go on with new lines as they come, until the server ends or Ctrl-C.
    #[arg(long, short)]
    follow: bool,
    /// Only lines from this time on: a duration before now such as 30m, or a time in RFC 3339.
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    since: Option<Timestamp>,
    /// Only lines of this level and more serious ones.
    #[arg(long)]
    level: Option<LogLevel>,
    /// Show at most this many of the last lines, 1 to 100000.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    lines: u32,
}

/// Where a server's log goes.
#[derive(Debug, PartialEq, Eq)]
enum LogSource {
    /// A file: its path, and the process that writes it.
    File { path: PathBuf, pid: i32 },
    /// The journal: what selects the server's entries.
    Journal { selector: String },
}

/// Runs `oubliette logs`.
pub(crate) async fn run(args: LogsArgs, context: CommandContext) -> Result<()> {
    context.require_home("logs")?;
    let source = match server_pid(&context.home).await {
        Some(pid) => source_of_process(pid)?,
        None => source_of_stopped(&context.home)?,
    };
    let filter = LogFilter::new(args.level, args.since);
    match source {
        LogSource::File { path, pid } => show_file(&args, &context, filter, &path, pid).await,
        LogSource::Journal { selector } => show_journal(&args, &context, filter, &selector).await,
    }
}

fn parse_since(text: &str) -> Result<Timestamp, String> {
    if let Ok(HumanDuration(span)) = text.parse() {
        return Timestamp::now()
            .checked_sub(span)
            .map_err(|error| error.to_string());
    }
    text.parse()
        .map_err(|_| "use a duration such as 30m or 2h, or a time such as 2026-01-31T12:00:00Z".to_owned())
}

/// The process that serves this home.
async fn server_pid(home: &HomeDir) -> Option<i32> {
    let stream = UnixStream::connect(home.control_socket()).await.ok()?;
    let pid = stream.peer_cred().ok()?.pid()?;
    oubliette_os::process_runs(pid).then_some(pid)
}

/// Where the standard error of a process goes.
fn source_of_process(pid: i32) -> Result<LogSource> {
    let link = format!("/proc/{pid}/fd/2");
    let target = std::fs::read_link(&link).map_err(|error| {
        Error::permission_denied(format!(
            "cannot see where the log of the server (process {pid}) goes: {error}; run this as the server's user or as root"
        ))
    })?;
    let shown = target.to_string_lossy().into_owned();
    if shown.starts_with("socket:") {
        let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        return Ok(LogSource::Journal {
            selector: journal_selector(&cgroup, pid),
        });
    }
    // Opened through /proc, so that it is the file even if it was renamed since.
    match Path::new(&link).metadata() {
        Ok(file) if file.is_file() => Ok(LogSource::File {
            path: link.into(),
            pid,
        }),
        _ => {
            let place = match shown.as_str() {
                "/dev/null" => "nowhere".to_owned(),
                pipe if pipe.starts_with("pipe:") => "to another program, through a pipe".to_owned(),
                terminal => format!("to {terminal}"),
            };
            Err(Error::unavailable(format!(
                "the log of the server (process {pid}) goes {place}, where it cannot be read again: start the server as a \
                 service, or with its standard error in a file (`oubliette serve 2>> oubliette.log`)"
            )))
        }
    }
}

/// The log of a server that does not run: the journal of the unit, if there is one.
fn source_of_stopped(home: &HomeDir) -> Result<LogSource> {
    let folders = [
        "/etc/systemd/system",
        "/lib/systemd/system",
        "/usr/lib/systemd/system",
    ];
    let installed = folders.iter().any(|folder| Path::new(folder).join(UNIT).exists());
    match installed && Path::new("/run/systemd/system").exists() {
        true => Ok(LogSource::Journal {
            selector: format!("--unit={UNIT}"),
        }),
        false => Err(Error::unavailable(format!(
            "no server is running for {}, so where its log went is not known: look at the file its standard error was \
             written to, or start it and try again",
            home.root().display()
        ))),
    }
}

/// What selects the journal's entries of a process: its unit if it is in one, so that those of earlier starts are seen too.
fn journal_selector(cgroup: &str, pid: i32) -> String {
    let parts = cgroup.lines().flat_map(|line| line.split('/'));
    let units: Vec<&str> = parts.filter(|part| part.ends_with(".service")).collect();
    match units.iter().rev().find(|unit| !unit.starts_with("user@")) {
        Some(unit) if units.iter().any(|unit| unit.starts_with("user@")) => format!("--user-unit={unit}"),
        Some(unit) => format!("--unit={unit}"),
        None => format!("_PID={pid}"),
    }
}

/// Shows the last lines of a file and, with `--follow`, those that are added.
async fn show_file(
    args: &LogsArgs,
    context: &CommandContext,
    mut filter: LogFilter,
    path: &Path,
    pid: i32,
) -> Result<()> {
    let broken = |error: std::io::Error| Error::unavailable(format!("the log cannot be read: {error}"));
    let mut file = File::open(path).map_err(broken)?;
    let size = file.metadata().map_err(broken)?.len();
    let mut at = size.saturating_sub(MAX_READ_BYTES);
    file.seek(SeekFrom::Start(at)).map_err(broken)?;
    let mut splitter = LogLineSplitter::default();
    let mut last = LastLines::new(args.lines as usize);
    let mut first = at > 0;
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let read = file.read(&mut chunk).map_err(broken)?;
        at += read as u64;
        for line in splitter.push(&chunk[..read]) {
            // Where reading began in the middle of the file, the first line is only a part of one.
            if !std::mem::take(&mut first) && filter.shows(&line) {
                last.push(line);
            }
        }
        if read == 0 || at >= size {
            break;
        }
    }
    if !print_lines(last.into_lines(), args, context) || !args.follow {
        return Ok(());
    }
    loop {
        let ended = !oubliette_os::process_runs(pid);
        if file.metadata().map_err(broken)?.len() < at {
            // It was emptied, as some programs do that rotate logs.
            at = 0;
            file.seek(SeekFrom::Start(0)).map_err(broken)?;
        }
        loop {
            let read = file.read(&mut chunk).map_err(broken)?;
            at += read as u64;
            let lines = splitter.push(&chunk[..read]);
            let lines = lines.into_iter().filter(|line| filter.shows(line)).collect();
            if !print_lines(lines, args, context) {
                return Ok(());
            }
            if read == 0 {
                break;
            }
        }
        if ended {
            return Ok(());
        }
        tokio::time::sleep(FOLLOW_INTERVAL).await;
    }
}

/// Shows the journal's entries.
async fn show_journal(
    args: &LogsArgs,
    context: &CommandContext,
    mut filter: LogFilter,
    selector: &str,
) -> Result<()> {
    let mut command = Command::new("journalctl");
    command.args(["--quiet", "--no-pager", "--output=cat", selector]);
    if let Some(since) = filter.since {
        command.arg(format!("--since=@{}", since.as_second()));
    }
    if filter.level.is_none() || args.follow {
        command.arg(format!("--lines={}", args.lines));
    }
    if args.follow {
        command.arg("--follow");
    }
    let started = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let mut journal = started.map_err(|error| {
        Error::unavailable(format!(
            "the server's log is in the journal, but journalctl cannot be started: {error}"
        ))
    })?;
    let mut output = journal
        .stdout
        .take()
        .ok_or_else(|| Error::internal("journalctl has no output"))?;
    // The journal has chosen by time already, and to the second.
    filter.since = None;
    let (mut splitter, mut last) = (LogLineSplitter::default(), LastLines::new(args.lines as usize));
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let read = output.read(&mut chunk).await.map_err(Error::internal)?;
        if read == 0 {
            break;
        }
        let lines = splitter.push(&chunk[..read]);
        let lines: Vec<String> = lines.into_iter().filter(|line| filter.shows(line)).collect();
        if !args.follow {
            lines.into_iter().for_each(|line| last.push(line));
        } else if !print_lines(lines, args, context) {
            return Ok(());
        }
    }
    let ended = journal.wait().await.map_err(Error::internal)?;
    match ended.success() {
        true if args.follow => Ok(()),
        true => {
            print_lines(last.into_lines(), args, context);
            Ok(())
        }
        false => Err(Error::unavailable(
            "journalctl could not read the journal; run this as root, or as a user of the group systemd-journal",
        )),
    }
}

/// Prints lines; false when nobody reads them any more.
fn print_lines(lines: Vec<String>, args: &LogsArgs, context: &CommandContext) -> bool {
    match (context.output, args.follow) {
        (OutputFormat::Json, false) => try_print_line(&json!({ "lines": lines }).to_string()),
        (OutputFormat::Json, true) => lines
            .iter()
            .all(|line| try_print_line(&json!({ "line": line }).to_string())),
        (OutputFormat::Text, _) => lines
            .iter()
            .all(|line| try_print_line(&strip_control_chars(line))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_asked_for_the_unit_of_the_server() {
        for (cgroup, expected) in [
            ("0::/system.slice/oubliette.service\n", "--unit=oubliette.service"),
            (
                "0::/system.slice/oubliette.service/server\n",
                "--unit=oubliette.service",
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/oub.service\n",
                "--user-unit=oub.service",
            ),
            ("0::/user.slice/session-2.scope\n", "_PID=7"),
            ("", "_PID=7"),
        ] {
            assert_eq!(journal_selector(cgroup, 7), expected, "{cgroup}");
        }
    }

    #[test]
    fn since_is_a_duration_or_a_time() {
        assert!(parse_since("30m").unwrap() < Timestamp::now());
        assert_eq!(
            parse_since("2026-01-31T12:00:00Z").unwrap().to_string(),
            "2026-01-31T12:00:00Z"
        );
        assert!(parse_since("yesterday").is_err());
    }
}
