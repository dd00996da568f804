//! `shell_exec` through the plane, with the host driver and in the real sandbox.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use oubliette_protocol::{Error, ErrorCode, tool::CallResult};
use oubliette_tools::{CallContext, RequestedTool};
use plane_support::{PlaneFixture, alive, from_agent, within_timeout};
use serde_json::{Value, json};

fn policy(commands: &[&str]) -> Value {
    json!({"name":"shell_exec","allowedCommands":commands,"allowedEnv":["GREETING"],"timeoutMs":20000})
}

fn field<'a>(result: &'a CallResult, name: &str) -> &'a Value {
    &result.structured_content.as_ref().unwrap()[name]
}

#[tokio::test]
async fn shell_exec_tool_registered() {
    let fixture = PlaneFixture::new();
    fixture.file("sub/f", "x");
    fixture
        .install_builtin(policy(&["ls", "cat", "env", "sh -c exit", "printf"]))
        .await;
    let ls = fixture
        .call_builtin(json!({"argv":["ls"],"cwd":"sub"}))
        .await
        .unwrap();
    assert_eq!(
        (field(&ls, "stdout"), field(&ls, "exit_code"), ls.is_error),
        (&json!("f\n"), &json!(0), false)
    );
    let cat = fixture
        .call_builtin(json!({"argv":["cat"],"stdin":"over"}))
        .await
        .unwrap();
    assert_eq!(cat.joined_text(), "over");
    let env = fixture
        .call_builtin(json!({"argv":["env"],"env":{"GREETING":"hi"}}))
        .await
        .unwrap()
        .joined_text();
    assert!(env.lines().any(|line| line == "GREETING=hi"), "{env}");
    let missing = fixture.call_builtin(json!({"argv":["ls","none"]})).await.unwrap();
    assert!(
        missing.is_error && missing.joined_text().contains("[exit code 2]"),
        "{missing:?}"
    );

    // Shell metacharacters reach the program unchanged.
    let nasty = "; $(touch owned) `touch owned` && touch owned | \"'\n";
    let printed = fixture
        .call_builtin(json!({"argv":["printf","%s",nasty]}))
        .await
        .unwrap();
    assert_eq!(field(&printed, "stdout"), nasty);
    assert!(!fixture.workspace().join("owned").exists());

    for (arguments, code) in [
        (json!({"argv":["rm","-rf","."]}), ErrorCode::NotAllowed),
        (json!({"argv":["ls;touch owned"]}), ErrorCode::NotAllowed),
        (json!({"argv":["/bin/ls"]}), ErrorCode::NotAllowed),
        (
            json!({"argv":["ls"],"env":{"LD_PRELOAD":"x"}}),
            ErrorCode::NotAllowed,
        ),
        (json!({"argv":["ls"],"env":{"PATH":"."}}), ErrorCode::NotAllowed),
        (json!({"argv":["ls"],"cwd":"/etc"}), ErrorCode::NotAllowed),
        (json!({"argv":["ls"],"cwd":"../"}), ErrorCode::NotAllowed),
        (json!({"argv":["ls"],"cwd":"none"}), ErrorCode::NotFound),
        (json!({"argv":["ls"],"cwd":"sub/f"}), ErrorCode::NotFound),
        (json!({"argv":[]}), ErrorCode::InvalidArgument),
        (json!({"argv":"ls"}), ErrorCode::InvalidArgument),
        (json!({"argv":["ls"],"shell":true}), ErrorCode::InvalidArgument),
    ] {
        let error = fixture.call_builtin(arguments.clone()).await.unwrap_err();
        assert_eq!(error.code, code, "{arguments}: {}", error.message);
    }
}

#[tokio::test]
async fn a_shell_policy_interprets_the_line() {
    let fixture = PlaneFixture::new();
    fixture
        .install_builtin(json!({"name":"shell_exec","allowedCommands":["echo"],"shell":true}))
        .await;
    let result = fixture
        .call_builtin(json!({"argv":["echo $((1+1)) | tr 2 3"]}))
        .await
        .unwrap();
    assert_eq!(field(&result, "stdout"), "3\n");
}

#[tokio::test]
async fn output_is_bounded_and_the_cut_is_marked() {
    let fixture = PlaneFixture::new();
    fixture.install_builtin(policy(&["seq", "yes"])).await;
    let result = fixture
        .call_builtin(json!({"argv":["seq","100000"]}))
        .await
        .unwrap();
    let out = field(&result, "stdout").as_str().unwrap();
    assert!(out.starts_with("1\n2\n") && out.ends_with("99999\n100000\n") && out.contains("bytes left out"));
    assert_eq!(field(&result, "truncated"), true);
    let flood = fixture.call_builtin(json!({"argv":["yes"]})).await.unwrap_err();
    assert_eq!(flood.code, ErrorCode::LimitExceeded);
}

/// A FIFO in the workspace to which a command writes a pid.
struct PidPipe(std::path::PathBuf);

impl PidPipe {
    fn at(fixture: &PlaneFixture, name: &str) -> Self {
        let path = fixture.workspace().join(name);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        Self(path)
    }

    async fn pid(self) -> i32 {
        let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(self.0).unwrap());
        within_timeout("the pid", read)
            .await
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }
}

#[tokio::test]
async fn past_its_timeout_the_whole_process_tree_is_killed() {
    let fixture = PlaneFixture::new();
    fixture.file(
        "f.sh",
        "(echo $$; sh -c 'echo $$ > child; exec sleep 1000') & echo begun; sleep 1000",
    );
    let mut policy = policy(&["sh"]);
    policy["timeoutMs"] = json!(5_000);
    fixture.install_builtin(policy).await;
    let child = PidPipe::at(&fixture, "child");
    let (result, child) = tokio::join!(fixture.call_builtin(json!({"argv":["sh","f.sh"]})), child.pid());
    let error = result.unwrap_err();
    assert_eq!(error.code, ErrorCode::Timeout);
    assert!(error.message.contains("begun"), "{}", error.message);
    assert!(!alive(child), "{child} is left");
    let call = &fixture.recorder.of("tool_call")[0];
    assert_eq!(
        (&call["ok"], &call["canonical"]),
        (&json!(false), &json!("@b/shell_exec"))
    );
}

#[tokio::test]
async fn a_cancelled_command_is_killed() {
    let fixture = PlaneFixture::new();
    fixture.file("f.sh", "echo $$ > pid; exec sleep 1000");
    fixture.install_builtin(policy(&["sh"])).await;
    let ctx = CallContext::default();
    let arguments = json!({"argv":["sh","f.sh"]}).as_object().unwrap().clone();
    let call = fixture.plane.call(
        RequestedTool::ByName("it".into()),
        arguments,
        from_agent(),
        ctx.clone(),
    );
    let told = PidPipe::at(&fixture, "pid");
    let cancel = async {
        let pid = rustix::process::Pid::from_raw(told.pid().await).unwrap();
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        ctx.cancel.cancel();
        process
    };
    let (result, process) = within_timeout("the cancelled call", async { tokio::join!(call, cancel) }).await;
    let error = Error::from(result.unwrap_err());
    assert_eq!(error.code, ErrorCode::Unavailable);
    // The cancelled call does not wait for the process, but the process is killed.
    let end = tokio::task::spawn_blocking(move || {
        let mut ended = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut ended, None).unwrap()
    });
    assert_eq!(within_timeout("the end of the process", end).await.unwrap(), 1);
}

#[tokio::test]
async fn processes_left_behind_do_not_delay_the_answer() {
    let fixture = PlaneFixture::new();
    fixture.file("f.sh", "sleep 1000 & echo $! > pid; echo done");
    fixture.install_builtin(policy(&["sh"])).await;
    let told = PidPipe::at(&fixture, "pid");
    let (result, left) = tokio::join!(fixture.call_builtin(json!({"argv":["sh","f.sh"]})), told.pid());
    assert_eq!(field(&result.unwrap(), "stdout"), "done\n");
    assert!(!alive(left));
}

#[tokio::test]
async fn in_the_real_sandbox_a_command_sees_the_workspace_and_no_network() {
    let fixture = PlaneFixture::with_local_sandbox().await;
    fixture.file("notes/f", "seen");
    std::fs::write(fixture.dir.path().join("secret"), "x").unwrap();
    fixture.install_builtin(policy(&["cat", "sh", "id", "pwd"])).await;
    let cat = fixture
        .call_builtin(json!({"argv":["cat","f"],"cwd":"notes"}))
        .await
        .unwrap();
    assert_eq!(cat.joined_text(), "seen", "{cat:?}");
    let written = fixture
        .call_builtin(json!({"argv":["sh","-c","echo made > out; cat /proc/net/route | wc -l; id -u"]}))
        .await
        .unwrap();
    assert_eq!(
        std::fs::read_to_string(fixture.workspace().join("out")).unwrap(),
        "made\n"
    );
    let uid = field(&written, "stdout")
        .as_str()
        .unwrap()
        .lines()
        .last()
        .unwrap()
        .to_owned();
    assert_ne!(uid, "0", "never root inside");
    let secret = fixture.dir.path().join("secret");
    let outside = fixture
        .call_builtin(json!({"argv":["cat", secret]}))
        .await
        .unwrap();
    assert!(outside.is_error, "{outside:?}");
}
