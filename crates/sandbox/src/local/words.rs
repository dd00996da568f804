//! Strings as `exec` wants them.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::driver::SandboxError;
use crate::host::REINSTALL;
use crate::wire::COMMAND;

pub(crate) fn of_path(path: &Path) -> Result<CString, SandboxError> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| SandboxError::Invalid(format!("the path {} holds a NUL byte", path.display())))
}

/// The inner stage, run without bubblewrap.
pub(crate) fn inner(client: &Path) -> Result<Vec<CString>, SandboxError> {
    Ok(vec![of_path(client)?, of_path(Path::new(COMMAND))?])
}

pub(crate) fn no_client(client: &Path, error: &io::Error) -> SandboxError {
    SandboxError::Unavailable {
        reason: format!("{} could not be started: {error}", client.display()),
        remedy: REINSTALL.into(),
    }
}
