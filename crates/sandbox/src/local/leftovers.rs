//! What a killed server left running, found and ended by the next server on the same home.
//!
//! Every sandbox ends by itself when its server does, because its control socket is closed. That takes code of ours
//! or of bubblewrap to run; a process of theirs that was killed alone, by the kernel's out-of-memory killer for
//! example, may leave its child waiting for ever. So every process that is started carries the server's identity in
//! its environment, as do the names of cgroups.

use std::ffi::CString;
use std::io::Read;
use std::str::FromStr;

use rustix::process::{Pid, PidfdFlags, Signal};

/// The environment variable of bubblewrap and of the inner stage: the home's scope and the server's identity. Programs
/// in a sandbox do not inherit it.
const MARK_VARIABLE: &str = "OUBLIETTE_SANDBOX";
/// How much of a process's environment is read. Those that carry the mark have hardly another variable.
const MARK_BYTES: u64 = 4096;

/// One run of a server: its pid and its start time, because pids are used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ServerIdentity {
    pid: Pid,
    /// In clock ticks since the host started.
    started: u64,
}

impl ServerIdentity {
    /// This process.
    pub(crate) fn current() -> Self {
        let pid = rustix::process::getpid();
        let started = read_stat(pid).map_or(0, |(_, started)| started);
        Self { pid, started }
    }

    /// Whether it still runs. A process that was killed and not yet reaped does not.
    pub(crate) fn is_running(self) -> bool {
        match read_stat(self.pid) {
            Some((state, started)) => started == self.started && !matches!(state, 'Z' | 'X'),
            // Another user's processes may be hidden in /proc.
            None => rustix::process::test_kill_process(self.pid) != Err(rustix::io::Errno::SRCH),
        }
    }
}

impl std::fmt::Display for ServerIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.pid.as_raw_pid(), self.started)
    }
}

impl FromStr for ServerIdentity {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (pid, started) = text.split_once('-').ok_or(())?;
        Ok(Self {
            pid: pid.parse().ok().and_then(Pid::from_raw).ok_or(())?,
            started: started.parse().map_err(|_| ())?,
        })
    }
}

/// The state and the start time of a process.
fn read_stat(pid: Pid) -> Option<(char, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    // The name, in parentheses, may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// The variable that marks a process as started by this server for a home.
pub(super) fn mark(scope: &str) -> Option<CString> {
    CString::new(format!("{MARK_VARIABLE}={scope}-{}", ServerIdentity::current())).ok()
}

/// Kills processes that an earlier server on this home started, if it no longer runs. Returns how many.
pub(super) fn kill_processes(scope: &str) -> usize {
    let mut killed = 0;
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name
            .to_str()
            .and_then(|name| name.parse().ok())
            .and_then(Pid::from_raw)
        else {
            continue;
        };
        // Looked at again once a pidfd holds on to the process: the pid may have been used again meanwhile.
        if is_leftover(pid, scope)
            && let Ok(process) = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            && is_leftover(pid, scope)
            && rustix::process::pidfd_send_signal(&process, Signal::KILL).is_ok()
        {
            killed += 1;
        }
    }
    killed
}

fn is_leftover(pid: Pid, scope: &str) -> bool {
    let mut environment = Vec::new();
    let read = std::fs::File::open(format!("/proc/{}/environ", pid.as_raw_pid()))
        .and_then(|file| file.take(MARK_BYTES).read_to_end(&mut environment));
    read.is_ok() && marked_server(&environment, scope).is_some_and(|server| !server.is_running())
}

/// The server that an environment names, if it is one of this home.
fn marked_server(environment: &[u8], scope: &str) -> Option<ServerIdentity> {
    environment.split(|byte| *byte == 0).find_map(|variable| {
        let mark = std::str::from_utf8(variable).ok()?.strip_prefix(MARK_VARIABLE)?;
        let (home, server) = mark.strip_prefix('=')?.split_once('-')?;
        (home == scope).then(|| server.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_of_one_run_only() {
        let own = ServerIdentity::current();
        assert!(own.is_running());
        assert_eq!(own.to_string().parse(), Ok(own));
        let earlier = ServerIdentity {
            started: own.started - 1,
            ..own
        };
        assert!(!earlier.is_running(), "the same pid, used by an earlier process");
        assert!("1".parse::<ServerIdentity>().is_err() && "0-1".parse::<ServerIdentity>().is_err());
    }

    #[test]
    fn only_marks_of_the_own_home_count() {
        let mark = mark("0a1b").unwrap();
        let own = Some(ServerIdentity::current());
        assert_eq!(marked_server(mark.as_bytes_with_nul(), "0a1b"), own);
        assert_eq!(marked_server(mark.as_bytes_with_nul(), "0a1c"), None);
        assert_eq!(marked_server(b"PATH=/bin\0", "0a1b"), None);
        assert_eq!(marked_server(b"", "0a1b"), None);
    }

    #[test]
    fn a_process_of_a_server_that_is_gone_is_killed() {
        let scope = format!("{:08x}", std::process::id());
        let start = |identity: ServerIdentity| {
            std::process::Command::new("/bin/sleep")
                .arg("600")
                .env_clear()
                .env(MARK_VARIABLE, format!("{scope}-{identity}"))
                .spawn()
                .unwrap()
        };
        let own = ServerIdentity::current();
        let mut kept = start(own);
        let mut left = start(ServerIdentity {
            started: own.started - 1,
            ..own
        });
        // Until it has executed `sleep`, its environment is that of this process.
        while kill_processes(&scope) == 0 {
            std::thread::yield_now();
        }
        left.wait().unwrap();
        assert!(kept.try_wait().unwrap().is_none(), "its server runs");
        kept.kill().unwrap();
        kept.wait().unwrap();
    }
}
