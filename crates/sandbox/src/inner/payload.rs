//! Starting the program.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::Pid;

use super::{StageError, landlock};
use crate::control_protocol::{DescendantCleanup, LaunchOrder};

/// Bounds of what is taken from an image's environment.
const MAX_IMAGE_ENV: usize = 256;
const MAX_IMAGE_ENV_BYTES: usize = 32 * 1024;

/// Starts the program in a session of its own, with the launch order's environment and nothing else.
#[allow(unsafe_code)]
pub(super) fn start(order: &LaunchOrder) -> Result<Pid, StageError> {
    let Some((program, arguments)) = order.argv.split_first() else {
        return Err(StageError::Failed("there is no program to run".into()));
    };
    if !order.cwd.is_dir() {
        return Err(StageError::NoProgram(format!(
            "the working directory {} is not there",
            order.cwd.display()
        )));
    }
    let cleanup = order.cleanup;
    let confine_signals = cleanup == DescendantCleanup::Descendants && order.confine.is_some();
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(environment(order, std::env::vars_os()))
        .current_dir(&order.cwd);
    // SAFETY: this process has one thread, so after fork every lock is free and allocation is sound.
    unsafe {
        command.pre_exec(move || {
            rustix::process::setsid()?;
            if cleanup == DescendantCleanup::Descendants {
                // In a pid namespace the kernel kills everything inside when pid 1 ends.
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            }
            if confine_signals {
                landlock::confine_signals().map_err(io::Error::other)?;
            }
            unblock_signals()
        });
    }
    let child = command.spawn().map_err(|error| match error.raw_os_error() {
        // It is there, but no process can be made: the limits are reached, or the host's are.
        Some(libc::EAGAIN | libc::ENOMEM) => StageError::at("starting the program", error),
        _ => StageError::NoProgram(reason(&error)),
    })?;
    // Only the pid is kept: the main loop reaps it together with all other children.
    Pid::from_raw(child.id().cast_signed()).ok_or_else(|| StageError::Failed("the program has no pid".into()))
}

/// The payload's environment. `own` is that of this process, which in a container is its image's.
fn environment(
    order: &LaunchOrder,
    own: impl Iterator<Item = (OsString, OsString)>,
) -> BTreeMap<OsString, OsString> {
    let set = |variables: &[(String, String)]| -> Vec<(OsString, OsString)> {
        let variables = variables.iter();
        variables
            .map(|(name, value)| (name.into(), value.into()))
            .collect()
    };
    let mut env = BTreeMap::new();
    if let Some(inherited) = &order.image_env {
        env.extend(set(&inherited.defaults));
        let mut bytes = 0;
        env.extend(own.take(MAX_IMAGE_ENV).filter(|(name, value)| {
            bytes += name.len() + value.len();
            bytes <= MAX_IMAGE_ENV_BYTES && !is_of_cluster(name)
        }));
    }
    env.extend(set(&order.env));
    env
}

/// Whether a cluster, and not the image, has set a variable: addresses of services, the pod's name.
fn is_of_cluster(name: &OsStr) -> bool {
    name == "HOSTNAME" || name.as_encoded_bytes().starts_with(b"KUBERNETES_")
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such program in the sandbox".to_owned(),
        io::ErrorKind::PermissionDenied => "it may not be executed".to_owned(),
        _ => error.to_string(),
    }
}

/// Unblocks all signals: the inner stage blocks those it reads from its signalfd, and programs expect none to be
/// blocked.
#[allow(unsafe_code)]
fn unblock_signals() -> io::Result<()> {
    // SAFETY: the set is initialised by sigemptyset before it is read.
    let failed = unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut())
    };
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_protocol::{AllowedPeers, InheritedEnv, Rlimits};

    #[test]
    fn an_image_gives_its_environment_only_where_the_order_says_so() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let mut order = LaunchOrder {
            argv: Vec::new(),
            env: vec![pair("HOME", "/home/agent"), pair("KEY", "order")],
            image_env: None,
            cwd: "/".into(),
            forwards: Vec::new(),
            allowed_peers: AllowedPeers::Anyone,
            confine: None,
            rlimits: Rlimits::default(),
            cleanup: DescendantCleanup::Descendants,
        };
        let own = [
            ("PATH", "/image/bin"),
            ("KEY", "image"),
            ("JAVA_HOME", "/jdk"),
            ("HOSTNAME", "pod"),
            ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
        ];
        let own = || own.map(|(name, value)| (name.into(), value.into())).into_iter();
        let names = |order: &LaunchOrder| -> Vec<String> {
            let env = environment(order, own());
            let text = |text: &OsString| text.to_string_lossy().into_owned();
            env.iter()
                .map(|(name, value)| format!("{}={}", text(name), text(value)))
                .collect()
        };
        assert_eq!(names(&order), ["HOME=/home/agent", "KEY=order"]);
        order.image_env = Some(InheritedEnv {
            defaults: vec![pair("PATH", "/bin"), pair("LANG", "C.UTF-8")],
        });
        assert_eq!(
            names(&order),
            [
                "HOME=/home/agent",
                "JAVA_HOME=/jdk",
                "KEY=order",
                "LANG=C.UTF-8",
                "PATH=/image/bin"
            ]
        );
        let endless = (0..10_000).map(|n| (format!("V{n}").into(), "x".repeat(100).into()));
        assert!(environment(&order, endless).len() <= MAX_IMAGE_ENV + 4);
    }
}
