//! Starting the program anew in the same process: what a server of a cluster does after the others have taken over its sessions.

use std::{ffi::OsString, os::unix::process::CommandExt, path::PathBuf, process::Command, time::Duration};

use oubliette_protocol::Error;

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

    /// Replaces this process by a new one with the same arguments. Returns only if that fails.
    pub(crate) async fn restart(self) -> Error {
        // Their supervisors end with this program.
        tokio::time::sleep(KILL_WAIT).await;
        let Some(program) = self.program else {
            return Error::unavailable("the server's own program is not known: start the server again");
        };
        let error = Command::new(&program)
            .args(self.arguments)
            .env(RESTARTED_VARIABLE, "1")
            .exec();
        Error::unavailable(format!(
            "starting {} anew failed: {error}; start the server again",
            program.display()
        ))
    }
}
