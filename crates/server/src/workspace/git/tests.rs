use std::path::Path;

use super::{
    diff::{MAX_DIFF_BYTES, diff_against_baseline},
    *,
};
use crate::config::TrustConfig;

const MAX_BYTES: u64 = 1 << 30;

fn git(dir: &Path) -> std::process::Command {
    let mut git = std::process::Command::new("git");
    git.current_dir(dir).args([
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-c",
        "init.defaultBranch=main",
    ]);
    git
}

fn repo() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), "one\n").unwrap();
    for args in [
        vec!["init", "-q"],
        vec!["add", "."],
        vec!["commit", "-qm", "first"],
        vec!["tag", "v1"],
        vec!["checkout", "-qb", "side"],
    ] {
        assert!(
            git(dir.path()).args(&args).status().unwrap().success(),
            "{args:?}"
        );
    }
    std::fs::write(dir.path().join("b.txt"), "side\n").unwrap();
    for args in [
        vec!["add", "."],
        vec!["commit", "-qm", "second"],
        vec!["checkout", "-q", "main"],
    ] {
        assert!(
            git(dir.path()).args(&args).status().unwrap().success(),
            "{args:?}"
        );
    }
    dir
}

fn trust_config_for(path: &Path) -> TrustConfig {
    TrustConfig {
        read_only: vec![path.to_owned()],
        ..TrustConfig::default()
    }
}

#[test]
fn urls_and_refs_are_checked() {
    let trust = TrustConfig::default();
    for good in ["https://h/x.git", "http://u:p@h/x", "ssh://git@h/x", "git://h/x"] {
        assert!(GitRemote::check(good, None, &trust).is_ok(), "{good}");
    }
    for bad in [
        "",
        "ext::sh -c id",
        "--upload-pack=x",
        "file:///etc",
        "/etc",
        "https://",
        "ssh://-oProxyCommand=x/y",
        "h:x",
        "https://a b/",
    ] {
        assert!(GitRemote::check(bad, None, &trust).is_err(), "{bad}");
    }
    for bad in ["", "-x", "--orphan", "a..b", "a b", "HEAD@{1}", "../x"] {
        assert!(
            GitRemote::check("https://h/x", Some(bad), &trust).is_err(),
            "{bad}"
        );
    }
    assert_eq!(without_password("https://u:p@h/x"), "https://u@h/x");
}

#[tokio::test]
async fn a_clone_is_diffed_against_its_first_content() {
    let source = repo();
    let remote = GitRemote::check(
        &format!("file://{}", source.path().display()),
        Some("v1"),
        &trust_config_for(source.path()),
    )
    .unwrap();
    let work = tempfile::tempdir().unwrap();
    let kept = tempfile::tempdir().unwrap();
    let repository = kept.path().join("w.git");
    clone_remote(&remote, work.path(), MAX_BYTES).await.unwrap();
    record_baseline(&repository, work.path()).await.unwrap();
    assert_eq!(
        diff_against_baseline(&repository, work.path())
            .await
            .unwrap()
            .text,
        ""
    );
    std::fs::write(work.path().join("a.txt"), "two\n").unwrap();
    std::fs::write(work.path().join("new.txt"), "new\n").unwrap();
    let diff = diff_against_baseline(&repository, work.path())
        .await
        .unwrap()
        .text;
    assert!(
        diff.contains("-one") && diff.contains("+two") && diff.contains("+++ b/new.txt"),
        "{diff}"
    );
    assert!(
        diff_against_baseline(&repository, work.path())
            .await
            .unwrap()
            .text
            == diff,
        "looking changes nothing"
    );
}

#[tokio::test]
async fn a_branch_is_checked_out_and_a_missing_ref_is_refused() {
    let source = repo();
    let remote = |reference: &str| {
        GitRemote::check(
            &source.path().display().to_string(),
            Some(reference),
            &trust_config_for(source.path()),
        )
        .unwrap()
    };
    let (work, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    clone_remote(&remote("side"), work.path(), MAX_BYTES)
        .await
        .unwrap();
    assert!(work.path().join("b.txt").exists());
    let refused = clone_remote(&remote("nowhere"), other.path(), MAX_BYTES).await;
    assert!(refused.unwrap_err().message.contains("nowhere"));
}

#[tokio::test]
async fn a_clone_that_is_too_large_is_refused() {
    let source = repo();
    let url = source.path().display().to_string();
    let remote = GitRemote::check(&url, None, &trust_config_for(source.path())).unwrap();
    let work = tempfile::tempdir().unwrap();
    let refused = clone_remote(&remote, work.path(), 1).await.unwrap_err();
    assert_eq!(refused.code, oubliette_protocol::ErrorCode::LimitExceeded);
}

#[tokio::test]
async fn a_workspace_cannot_make_git_run_anything() {
    let work = tempfile::tempdir().unwrap();
    let kept = tempfile::tempdir().unwrap();
    let mark = kept.path().join("ran");
    let repository = kept.path().join("w.git");
    // An agent's own repository with every hook into git that there is.
    assert!(git(work.path()).args(["init", "-q"]).status().unwrap().success());
    let script = work.path().join("x.sh");
    std::fs::write(&script, format!("#!/bin/sh\ntouch {}\ncat\n", mark.display())).unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for (key, value) in [
        ("core.fsmonitor", &script),
        ("filter.x.clean", &script),
        ("diff.x.textconv", &script),
        ("diff.external", &script),
    ] {
        git(work.path())
            .arg("config")
            .arg(key)
            .arg(value)
            .status()
            .unwrap();
    }
    std::fs::write(work.path().join(".gitattributes"), "* filter=x diff=x\n").unwrap();
    std::fs::write(work.path().join("f"), "text\n").unwrap();
    let nested = work.path().join("nested");
    std::fs::create_dir(&nested).unwrap();
    assert!(git(&nested).args(["init", "-q"]).status().unwrap().success());
    git(&nested)
        .args(["config", "core.fsmonitor"])
        .arg(&script)
        .status()
        .unwrap();
    git(&nested)
        .args(["commit", "-q", "--allow-empty", "-m", "x"])
        .env("GIT_OPTIONAL_LOCKS", "0")
        .status()
        .unwrap();
    let _ = std::fs::remove_file(&mark);
    let diff = diff_against_baseline(&repository, work.path()).await.unwrap();
    assert!(diff.text.contains("+text"), "{}", diff.text);
    assert!(!mark.exists(), "something of the workspace was run");
}

#[tokio::test]
async fn a_diff_is_cut_at_its_maximum_length() {
    let work = tempfile::tempdir().unwrap();
    let kept = tempfile::tempdir().unwrap();
    std::fs::write(work.path().join("f"), "x\n".repeat(MAX_DIFF_BYTES)).unwrap();
    let diff = diff_against_baseline(&kept.path().join("w.git"), work.path())
        .await
        .unwrap();
    assert!(diff.truncated && diff.text.len() <= MAX_DIFF_BYTES);
}
