//! Starting the program anew in the same process: what a server of a cluster does after the others have taken over its sessions.

use std::{
    ffi::OsString, fs, future::Future, os::unix::process::CommandExt, path::PathBuf, process::Command,
    time::Duration,
};

use oubliette_protocol::{Error, Result};
use rustix::process::{Pid, WaitOptions, waitpid};
use tokio::signal::unix::{SignalKind, signal};

/// Set for the program that is started anew: it waits for a database that it cannot reach, instead of ending.
pub(crate) const RESTARTED_VARIABLE: &str = "OUBLIETTE_RESTARTED";
/// How long killed sandboxes are waited for.
const KILL_WAIT: Duration = Duration::from_millis(300);

/// How this process was started.
pub(crate) struct ProgramStart {
    program: Option<PathBuf>,
    arguments: Vec<OsString>,
}

impl ProgramStart {
    /// To be asked at the start: after an upgrade the program's file is another one, at the same path.
    pub(crate) fn of_this_process() -> Self {
        Self {
            program: std::env::current_exe().ok(),
            arguments: std::env::args_os().skip(1).collect(),
        }
    }

    /// Replaces this process by a new one with the same arguments. Returns an error if that fails, and nothing if the server is
    /// told to stop before: the new program would know nothing of a signal that this one has received.
    pub(crate) async fn restart(self, stop: impl Future<Output = ()>) -> Result<()> {
        tokio::select! {
            biased;
            () = stop => {
                tracing::info!("stopping instead of starting anew");
                return Ok(());
            }
            // Their supervisors end with this program.
            () = tokio::time::sleep(KILL_WAIT) => {}
        }
        let Some(program) = self.program else {
            return Err(Error::unavailable(
                "the server's own program is not known: start the server again",
            ));
        };
        let error = Command::new(&program)
            .args(self.arguments)
            .env(RESTARTED_VARIABLE, "1")
            .exec();
        Err(Error::unavailable(format!(
            "starting {} anew failed: {error}; start the server again",
            program.display()
        )))
    }
}

/// Waits, in the background, for the children that this process has from the program that ran in it before: nobody else does,
/// and one that has ended would stay a zombie. To be called before the first child is started.
pub(crate) fn reap_inherited_children() -> Result<()> {
    // Before the children are listed, so that no end is missed.
    let mut ended = signal(SignalKind::child()).map_err(Error::internal)?;
    let mut children = own_children();
    tokio::spawn(async move {
        loop {
            children.retain(|child| matches!(waitpid(Some(*child), WaitOptions::NOHANG), Ok(None)));
            if children.is_empty() || ended.recv().await.is_none() {
                return;
            }
        }
    });
    Ok(())
}

/// The children of this process, also those that have ended and were not waited for.
fn own_children() -> Vec<Pid> {
    let own = std::process::id().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_child = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // State and parent follow the program's name, which stands in parentheses and may contain some.
        stat.rsplit_once(") ")
            .and_then(|(_, rest)| rest.split_whitespace().nth(1))
            == Some(own.as_str())
    };
    ids.filter(is_child).filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use rustix::process::{Signal, getpid, kill_process};

    use super::*;
    use crate::cli::serve::ShutdownSignals;

    #[tokio::test]
    async fn a_fenced_server_that_is_told_to_stop_does_not_start_anew() {
        let mut stop = ShutdownSignals::listen().unwrap();
        kill_process(getpid(), Signal::TERM).unwrap();
        // Were it started, it would end the tests with an error.
        let program = ProgramStart {
            program: Some("/bin/false".into()),
            arguments: Vec::new(),
        };
        program.restart(stop.wait_for_end()).await.unwrap();
    }
}
