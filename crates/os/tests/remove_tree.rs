//! Trees that a program made to be hard to remove are removed, with a small stack and few descriptors.

#![allow(clippy::unwrap_used, missing_docs)]

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use oubliette_os::{remove_tree, remove_tree_blocking};
use rustix::fs::{CWD, Mode, OFlags};

/// Removes with so little stack that calls which nest with the tree would not fit.
fn remove(path: &Path) -> std::io::Result<u64> {
    let path = path.to_owned();
    let thread = std::thread::Builder::new().stack_size(128 * 1024);
    thread
        .spawn(move || remove_tree_blocking(&path))
        .unwrap()
        .join()
        .unwrap()
}

/// Makes a chain of directories, each in the one before.
fn nest(top: &Path, depth: usize) {
    fs::create_dir(top).unwrap();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut end = rustix::fs::openat(CWD, top, flags, Mode::empty()).unwrap();
    for _ in 0..depth {
        rustix::fs::mkdirat(&end, "d", Mode::RWXU).unwrap();
        end = rustix::fs::openat(&end, "d", flags, Mode::empty()).unwrap();
    }
}

#[test]
fn a_hundred_thousand_nested_directories_are_removed() {
    let dir = tempfile::tempdir_in(memory()).unwrap();
    let top = dir.path().join("top");
    nest(&top, 100_000);
    assert_eq!(remove(&top).unwrap(), 100_001);
    assert!(!top.exists());
}

/// A file system in memory, where there is one: on a disk others use this takes minutes.
fn memory() -> &'static Path {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        memory
    } else {
        Path::new("/tmp")
    }
}

#[test]
fn wide_trees_with_files_of_every_kind_are_removed_and_nothing_else() {
    let dir = tempfile::tempdir_in(memory()).unwrap();
    let kept = dir.path().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "x").unwrap();
    let top = dir.path().join("top");
    for a in 0..40 {
        for b in 0..40 {
            let folder = top.join(format!("{a}/{b}/long {}", "n".repeat(200)));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("file"), "x").unwrap();
        }
    }
    for n in 0..3000 {
        fs::create_dir_all(top.join(format!("flat{n}/in"))).unwrap();
    }
    symlink(&kept, top.join("link")).unwrap();
    symlink(&kept, top.join("1/link")).unwrap();
    symlink("/nowhere", top.join("1/1/dangling")).unwrap();
    fs::hard_link(kept.join("file"), top.join("1/hard")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(top.join("socket")).unwrap();
    rustix::fs::mknodat(CWD, top.join("fifo"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    // What a removal that was interrupted left.
    fs::create_dir_all(top.join(format!(".removing-{}-1/x", std::process::id()))).unwrap();
    remove(&top).unwrap();
    assert!(!top.exists());
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "x");
}

#[test]
fn files_links_and_nothing_at_all_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (file, link) = (dir.path().join("file"), dir.path().join("link"));
    fs::write(&file, "x").unwrap();
    symlink(dir.path(), &link).unwrap();
    assert_eq!(remove(&link).unwrap(), 1);
    assert_eq!(remove(&file).unwrap(), 1);
    assert_eq!(remove(&file).unwrap(), 0);
    assert_eq!(remove(&dir.path().join("no/such/dir")).unwrap(), 0);
    assert!(dir.path().exists());
    assert!(remove(Path::new("/")).is_err());
}

#[test]
fn directories_closed_to_their_owner_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let top = dir.path().join("top");
    fs::create_dir_all(top.join("a/b/c")).unwrap();
    fs::create_dir_all(top.join("read only/b")).unwrap();
    let close =
        |path: &str, mode| fs::set_permissions(top.join(path), fs::Permissions::from_mode(mode)).unwrap();
    close("a/b/c", 0);
    close("a/b", 0);
    close("a", 0o300);
    close("read only/b", 0o500);
    close("read only", 0o500);
    fs::set_permissions(&top, fs::Permissions::from_mode(0o000)).unwrap();
    let user = rustix::process::geteuid();
    if user.is_root() {
        // Root opens them anyway: this is for another user, in a thread that has no privilege.
        let owner = rustix::fs::Uid::from_raw(65534);
        for path in ["a/b/c", "a/b", "a", "read only/b", "read only", "."] {
            std::os::unix::fs::chown(top.join(path), Some(owner.as_raw()), None).unwrap();
        }
        std::os::unix::fs::chown(dir.path(), Some(owner.as_raw()), None).unwrap();
        let path = top.clone();
        let removed = std::thread::spawn(move || {
            rustix::thread::set_thread_res_uid(owner, owner, owner).unwrap();
            remove_tree_blocking(&path)
        });
        removed.join().unwrap().unwrap();
    } else {
        remove(&top).unwrap();
    }
    assert!(!top.exists());
}

#[test]
fn a_program_that_moves_and_creates_directories_meanwhile_leads_it_nowhere_else() {
    // The program ends by itself, not with the removals: one of those goes on as long as it finds something new.
    const STEPS: u64 = 20_000;
    let dir = tempfile::tempdir_in(memory()).unwrap();
    let kept = dir.path().join("kept");
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "x").unwrap();
    let top = dir.path().join("top");
    let meddler = {
        let (top, kept) = (top.clone(), kept.clone());
        std::thread::spawn(move || {
            for n in 0..STEPS {
                let (a, b) = (top.join(format!("a{}", n % 7)), top.join(format!("b{}", n % 5)));
                let _ = fs::create_dir_all(a.join("x/y"));
                let _ = fs::write(a.join("x/y/file"), "x");
                // A directory becomes a link to elsewhere, and the other way round.
                let _ = symlink(&kept, &b);
                let _ = rustix::fs::renameat_with(CWD, &a, CWD, &b, rustix::fs::RenameFlags::EXCHANGE);
                let _ = fs::rename(a.join("x"), top.join("moved"));
            }
        })
    };
    let mut removals = 0;
    while !meddler.is_finished() || removals == 0 {
        let _ = fs::create_dir_all(top.join("a/b/c"));
        // It may give up, or not.
        let _ = remove(&top);
        removals += 1;
    }
    meddler.join().unwrap();
    remove(&top).unwrap();
    assert!(!top.exists());
    assert_eq!(fs::read_to_string(kept.join("file")).unwrap(), "x");
}

#[tokio::test]
async fn many_removals_at_once_all_end() {
    let dir = tempfile::tempdir().unwrap();
    let trees: Vec<_> = (0..20).map(|n| dir.path().join(n.to_string())).collect();
    for tree in &trees {
        fs::create_dir_all(tree.join("a/b")).unwrap();
    }
    let removals: Vec<_> = trees
        .iter()
        .map(|tree| tokio::spawn(remove_tree(tree.clone())))
        .collect();
    for removal in removals {
        assert_eq!(removal.await.unwrap().unwrap(), 3);
    }
}
