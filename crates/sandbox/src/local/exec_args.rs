//! C strings for `exec`, and the error when the inner stage cannot be executed.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::control_protocol::INIT_COMMAND;
use crate::driver::SandboxError;
use crate::host::REINSTALL;

/// A path as a C string.
pub(crate) fn path_cstring(path: &Path) -> Result<CString, SandboxError> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| SandboxError::Invalid(format!("the path {} holds a NUL byte", path.display())))
}

/// The command line of the inner stage when it runs without bubblewrap.
pub(crate) fn inner_stage_argv(client: &Path) -> Result<Vec<CString>, SandboxError> {
    Ok(vec![
        path_cstring(client)?,
        path_cstring(Path::new(INIT_COMMAND))?,
    ])
}

/// The error for an `oubliette-client` that could not be executed.
pub(crate) fn client_start_error(client: &Path, error: &io::Error) -> SandboxError {
    SandboxError::Unavailable {
        reason: format!("{} could not be started: {error}", client.display()),
        remedy: REINSTALL.into(),
    }
}
