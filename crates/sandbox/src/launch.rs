//! Starting a sandbox's first process, from a thread that never ends.
//!
//! `--die-with-parent` and every other parent-death signal fire when the *thread* that started the child
//! ends, and the threads of an async runtime come and go: so one thread, kept for the life of the server,
//! starts them all.
//!
//! `posix_spawn` is used instead of `fork`: it does not copy the server's page tables, and nothing of ours
//! has to run between fork and exec.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock, mpsc};

use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus};

use crate::control_protocol::CONTROL_FD;
use crate::local::cgroup::SandboxCgroup;

/// File descriptor from which bubblewrap reads its arguments.
pub(crate) const BWRAP_ARGS_FD: RawFd = 4;
/// File descriptor to which bubblewrap writes the pid of the inner stage.
pub(crate) const BWRAP_INFO_FD: RawFd = 5;

/// The process to start. Its environment is always empty: the payload's environment is in the [`LaunchOrder`].
///
/// [`LaunchOrder`]: crate::control_protocol::LaunchOrder
pub(crate) struct LaunchPlan {
    pub(crate) program: CString,
    pub(crate) argv: Vec<CString>,
    /// Bubblewrap's arguments, NUL-separated, for [`BWRAP_ARGS_FD`].
    pub(crate) bwrap_args: Option<Vec<u8>>,
    /// The cgroup to start it in.
    pub(crate) group: Option<SandboxCgroup>,
}

/// A started process and our ends of its pipes.
pub(crate) struct LaunchedProcess {
    pub(crate) child: ChildProcess,
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    pub(crate) control: UnixStream,
    pub(crate) bwrap_info: Option<OwnedFd>,
    pub(crate) group: Option<SandboxCgroup>,
}

/// A child process, killed and reaped when dropped.
pub(crate) struct ChildProcess {
    pub(crate) pid: Pid,
    pub(crate) pidfd: Arc<OwnedFd>,
    reaped: bool,
}

impl ChildProcess {
    pub(crate) fn kill(&self) {
        // Fails if it has already ended.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Reaps it, if it has ended.
    pub(crate) fn try_reap(&mut self) -> io::Result<Option<WaitIdStatus>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let status = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options)?;
        self.reaped |= status.is_some();
        Ok(status)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if !self.reaped {
            self.kill();
            let _ = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
        }
    }
}

type LaunchJob = Box<dyn FnOnce() + Send>;

/// The queue of the thread that starts all processes; started on first use.
fn starter() -> io::Result<&'static mpsc::Sender<LaunchJob>> {
    static STARTER: OnceLock<Result<mpsc::Sender<LaunchJob>, String>> = OnceLock::new();
    STARTER
        .get_or_init(|| {
            let (sender, jobs) = mpsc::channel::<LaunchJob>();
            std::thread::Builder::new()
                .name("sandbox-start".into())
                .spawn(move || jobs.into_iter().for_each(|job| job()))
                .map(|_| sender)
                .map_err(|error| error.to_string())
        })
        .as_ref()
        .map_err(|error| io::Error::other(error.clone()))
}

/// Starts a process on the starter thread.
pub(crate) async fn launch(plan: LaunchPlan) -> io::Result<LaunchedProcess> {
    let (answer, launched) = tokio::sync::oneshot::channel();
    // If the caller has stopped waiting, the child is dropped here, which kills it.
    let job: LaunchJob = Box::new(move || drop(answer.send(start(plan))));
    starter()?
        .send(job)
        .map_err(|_| io::Error::other("the starter thread has ended"))?;
    launched
        .await
        .map_err(|_| io::Error::other("the starter thread has ended"))?
}

fn start(plan: LaunchPlan) -> io::Result<LaunchedProcess> {
    let (stdin_inside, stdin) = pipe()?;
    let (stdout, stdout_inside) = pipe()?;
    let (stderr, stderr_inside) = pipe()?;
    let (control, control_inside) = UnixStream::pair()?;
    let args = plan.bwrap_args.as_ref().map(|_| pipe()).transpose()?;
    let info = plan.bwrap_args.as_ref().map(|_| pipe()).transpose()?;

    let mut inherited: Vec<(BorrowedFd<'_>, RawFd)> = vec![
        (stdin_inside.as_fd(), 0),
        (stdout_inside.as_fd(), 1),
        (stderr_inside.as_fd(), 2),
        (control_inside.as_fd(), CONTROL_FD),
    ];
    inherited.extend(args.iter().map(|(read, _)| (read.as_fd(), BWRAP_ARGS_FD)));
    inherited.extend(info.iter().map(|(_, write)| (write.as_fd(), BWRAP_INFO_FD)));

    let spawn = || spawn(&plan.program, &plan.argv, &inherited);
    let pid = match &plan.group {
        Some(group) => group.spawn_inside(spawn)?,
        None => spawn()?,
    };
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(error) => {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            return Err(error.into());
        }
    };
    let child = ChildProcess {
        pid,
        pidfd: Arc::new(pidfd),
        reaped: false,
    };

    // The child cannot have started anything yet: bubblewrap waits for its arguments, the inner stage for its
    // launch order. So everything it starts later is in the same cgroup and inherits the raised
    // oom_score_adj, which makes it the first to be killed when the host itself runs out of memory.
    if let Some(group) = &plan.group {
        group.add(pid)?;
    }
    let _ = std::fs::write(format!("/proc/{}/oom_score_adj", pid.as_raw_pid()), "500");
    if let (Some(bytes), Some((_, write))) = (&plan.bwrap_args, args) {
        write_and_close(write, bytes)?;
    }
    Ok(LaunchedProcess {
        child,
        stdin,
        stdout,
        stderr,
        control,
        bwrap_info: info.map(|(read, _)| read),
        group: plan.group,
    })
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

/// Writes all bytes to a pipe and closes it. The pipe's buffer is enlarged to hold them all, so that a reader
/// that hangs cannot block this thread.
fn write_and_close(pipe: OwnedFd, bytes: &[u8]) -> io::Result<()> {
    const DEFAULT: usize = 65_536;
    if bytes.len() > DEFAULT {
        rustix::pipe::fcntl_setpipe_size(&pipe, bytes.len())?;
    }
    io::Write::write_all(&mut std::fs::File::from(pipe), bytes)
}

/// `posix_spawn` in a session of its own (so that the terminal's Ctrl-C reaches the server alone), with just
/// these file descriptors, no environment, no blocked and no ignored signals.
#[allow(unsafe_code)]
fn spawn(program: &CString, argv: &[CString], inherited: &[(BorrowedFd<'_>, RawFd)]) -> io::Result<Pid> {
    // Sources are first moved out of the way of targets: `dup2(a, 3)` would close a source that is 3.
    let moved = inherited
        .iter()
        .map(|(fd, target)| Ok((rustix::io::fcntl_dupfd_cloexec(fd, 64)?, *target)))
        .collect::<io::Result<Vec<(OwnedFd, RawFd)>>>()?;

    let mut argv: Vec<*mut libc::c_char> = argv.iter().map(|arg| arg.as_ptr().cast_mut()).collect();
    argv.push(std::ptr::null_mut());
    let environment: [*mut libc::c_char; 1] = [std::ptr::null_mut()];

    // SAFETY: `actions` and `attributes` are initialised before use and destroyed on every path; every
    // pointer handed over (program, argv, environment, signal sets) outlives the call, argv and the
    // environment end in null, and posix_spawn copies what it keeps.
    unsafe {
        let mut actions: libc::posix_spawn_file_actions_t = std::mem::zeroed();
        check(libc::posix_spawn_file_actions_init(&mut actions))?;
        let mut attributes: libc::posix_spawnattr_t = std::mem::zeroed();
        if let Err(error) = check(libc::posix_spawnattr_init(&mut attributes)) {
            libc::posix_spawn_file_actions_destroy(&mut actions);
            return Err(error);
        }
        let result: io::Result<libc::pid_t> = (|| {
            for (fd, target) in &moved {
                check(libc::posix_spawn_file_actions_adddup2(
                    &mut actions,
                    fd.as_raw_fd(),
                    *target,
                ))?;
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut none);
            check(libc::posix_spawnattr_setsigmask(&mut attributes, &none))?;
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            check(libc::posix_spawnattr_setsigdefault(&mut attributes, &all))?;
            let flags = libc::POSIX_SPAWN_SETSIGMASK | libc::POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID;
            check(libc::posix_spawnattr_setflags(
                &mut attributes,
                flags as libc::c_short,
            ))?;
            let mut pid: libc::pid_t = 0;
            check(libc::posix_spawn(
                &mut pid,
                program.as_ptr(),
                &actions,
                &attributes,
                argv.as_ptr(),
                environment.as_ptr(),
            ))?;
            Ok(pid)
        })();
        libc::posix_spawnattr_destroy(&mut attributes);
        libc::posix_spawn_file_actions_destroy(&mut actions);
        Pid::from_raw(result?).ok_or_else(|| io::Error::other("posix_spawn gave no pid"))
    }
}

/// glibc and musl agree on it; the libc crate does not name it for every target.
const POSIX_SPAWN_SETSID: libc::c_int = 0x80;

/// The posix_spawn family returns its error instead of setting errno.
fn check(code: libc::c_int) -> io::Result<()> {
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(code))
    }
}
