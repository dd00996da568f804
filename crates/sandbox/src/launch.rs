//! Starting a sandbox's first process.
//!
//! It must end when the server does, also when the server is killed in this very moment. A parent-death signal does
//! not ensure that. Bubblewrap's `--die-with-parent` kills the outer of its two processes while the inner one may
//! still wait for it, which it then does for ever; the same happens when writing to its `--info-fd` fails because
//! nobody is left to read. So bubblewrap gets neither a parent-death signal nor a pipe whose reader can vanish: it
//! always comes to start the inner stage, and that ends when the control socket is closed, which the kernel does.
//!
//! One thread starts all processes: it moves itself into the new sandbox's cgroup and out again.
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
/// The reading end of the same pipe. Bubblewrap does not use it; that it has it keeps the pipe from breaking.
const BWRAP_INFO_READER_FD: RawFd = 6;
/// How long a process may take to end after its descendants before it is killed itself, in milliseconds.
const END_TIMEOUT_MS: u32 = 200;

/// The process to start. The payload's environment is not here but in the [`LaunchOrder`].
///
/// [`LaunchOrder`]: crate::control_protocol::LaunchOrder
pub(crate) struct LaunchPlan {
    pub(crate) program: CString,
    pub(crate) argv: Vec<CString>,
    /// Its whole environment, `NAME=value`.
    pub(crate) environment: Vec<CString>,
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
    /// Kills it and every process below it. Killed alone, bubblewrap would leave a child that waits for it; without its
    /// child it ends by itself. Stopping it first, so that it starts nothing meanwhile, is no way: a server that is killed
    /// then leaves a stopped process behind.
    pub(crate) fn kill_tree(&self) {
        for _ in 0..END_TIMEOUT_MS {
            self.kill_descendants();
            let path = format!("/proc/{}/stat", self.pid.as_raw_pid());
            let stat = std::fs::read_to_string(path).unwrap_or_default();
            let state = stat
                .rsplit_once(')')
                .and_then(|(_, rest)| rest.trim().chars().next());
            if !matches!(state, Some('R' | 'S' | 'D')) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        self.kill_descendants();
        // It fails if the process has already ended.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    fn kill_descendants(&self) {
        for pid in crate::inner::descendants_of(self.pid.as_raw_pid()) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
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
            self.kill_tree();
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
    if let Some((read, write)) = &info {
        inherited.push((write.as_fd(), BWRAP_INFO_FD));
        inherited.push((read.as_fd(), BWRAP_INFO_READER_FD));
    }

    let spawn = || spawn(&plan.program, &plan.argv, &plan.environment, &inherited);
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
/// these file descriptors and this environment, no blocked and no ignored signals.
#[allow(unsafe_code)]
fn spawn(
    program: &CString,
    argv: &[CString],
    environment: &[CString],
    inherited: &[(BorrowedFd<'_>, RawFd)],
) -> io::Result<Pid> {
    // Sources are first moved out of the way of targets: `dup2(a, 3)` would close a source that is 3.
    let moved = inherited
        .iter()
        .map(|(fd, target)| Ok((rustix::io::fcntl_dupfd_cloexec(fd, 64)?, *target)))
        .collect::<io::Result<Vec<(OwnedFd, RawFd)>>>()?;

    let pointers = |words: &[CString]| -> Vec<*mut libc::c_char> {
        let words = words.iter().map(|word| word.as_ptr().cast_mut());
        words.chain([std::ptr::null_mut()]).collect()
    };
    let (argv, environment) = (pointers(argv), pointers(environment));

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
