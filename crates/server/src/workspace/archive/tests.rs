use std::{io::Read as _, os::unix::fs::symlink};

use futures::StreamExt as _;

use super::{
    places::{MAX_TRANSFERS, MAX_WORKSPACE_TRANSFERS},
    *,
};

async fn unpack(mut stream: ArchiveStream) -> Vec<(String, tar::EntryType, Vec<u8>)> {
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await {
        bytes.extend_from_slice(&chunk.unwrap());
    }
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
    let mut seen = Vec::new();
    for entry in tar.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        let path = entry.path().unwrap().display().to_string();
        seen.push((path, entry.header().entry_type(), content));
    }
    seen
}

fn pack(dir: &Path) -> ArchiveStream {
    ArchiveDownloads::default()
        .pack(&WorkspaceId::generate(), dir)
        .unwrap()
}

#[tokio::test]
async fn a_workspace_is_packed_with_links_as_links() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("d")).unwrap();
    std::fs::write(dir.path().join("d/f"), "x".repeat(200_000)).unwrap();
    symlink("/etc/passwd", dir.path().join("l")).unwrap();
    let seen = unpack(pack(dir.path())).await;
    assert_eq!(
        seen,
        [
            ("d".to_owned(), tar::EntryType::Directory, vec![]),
            ("d/f".to_owned(), tar::EntryType::Regular, vec![b'x'; 200_000]),
            ("l".to_owned(), tar::EntryType::Symlink, vec![]),
        ]
    );
}

#[tokio::test]
async fn large_contents_many_names_and_long_paths_are_packed_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut state = 1_u64;
    let random: Vec<u8> = (0..3_000_001)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    std::fs::write(dir.path().join("random"), &random).unwrap();
    std::fs::write(dir.path().join("block"), [7; 512]).unwrap();
    let long = dir.path().join("n".repeat(200)).join("m".repeat(200));
    std::fs::create_dir_all(&long).unwrap();
    for n in 0..12_000 {
        std::fs::write(long.join(n.to_string()), "").unwrap();
    }
    let seen = unpack(pack(dir.path())).await;
    assert_eq!(seen.len(), 12_004);
    let content = |name: &str| &seen.iter().find(|(path, ..)| path == name).unwrap().2;
    assert!(content("random") == &random);
    assert_eq!(content("block"), &[7; 512]);
    let below = seen.iter().filter(|(path, ..)| path.contains("/mm")).count();
    assert_eq!(below, 12_001);
}

#[tokio::test]
async fn folders_nested_too_deep_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let deep: std::path::PathBuf = (0..300).map(|_| "d").collect();
    std::fs::create_dir_all(dir.path().join(deep)).unwrap();
    let seen = unpack(pack(dir.path())).await;
    assert_eq!(seen.len(), 201);
}

#[tokio::test]
async fn places_are_limited_and_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let downloads = ArchiveDownloads::default();
    let workspace = WorkspaceId::generate();
    let mut open: Vec<_> = (0..MAX_WORKSPACE_TRANSFERS)
        .map(|_| downloads.pack(&workspace, dir.path()).unwrap())
        .collect();
    let refused = downloads.pack(&workspace, dir.path()).err().unwrap();
    assert_eq!(refused.code, oubliette_protocol::ErrorCode::LimitExceeded);
    open.pop();
    assert!(downloads.pack(&workspace, dir.path()).is_ok());
    let mut others = Vec::new();
    while let Ok(other) = downloads.pack(&WorkspaceId::generate(), dir.path()) {
        others.push(other);
    }
    assert_eq!(open.len() + others.len(), MAX_TRANSFERS);
    drop((open, others));
    assert_eq!(downloads.0.available(), MAX_TRANSFERS);
    assert!(downloads.0.has_no_workspace());
}

#[tokio::test(start_paused = true)]
async fn a_download_of_which_nothing_is_taken_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), vec![1; 100_000]).unwrap();
    let downloads = ArchiveDownloads::default();
    let mut stalled = downloads.pack(&WorkspaceId::generate(), dir.path()).unwrap();
    tokio::time::sleep(2 * STALL_TIMEOUT).await;
    assert_eq!(downloads.0.available(), MAX_TRANSFERS);
    assert!(stalled.next().await.unwrap().is_err());
}
