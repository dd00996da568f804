//! What a backup says about itself and its contents.

use std::{
    collections::BTreeMap,
    io::{self, Read},
};

use jiff::Timestamp;
use oubliette_store::{TableDigest, transfer::RowDigest};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::home_path::HomePath;

/// The version of the archive's format.
pub(crate) const FORMAT: u32 = 1;

/// What made a backup. Unknown fields are accepted: a newer format is refused by its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BackupHeader {
    /// The version of the archive's format.
    pub(crate) format: u32,
    /// The version of the program that made it.
    pub(crate) version: String,
    /// The version of the database's schema.
    pub(crate) schema: i64,
    /// When the rows were read.
    pub(crate) created_at: Timestamp,
}

/// What a backup holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BackupManifest {
    /// As in the first entry.
    pub(crate) backup: BackupHeader,
    /// Every table, with the count and hash of its rows.
    pub(crate) tables: Vec<TableDigest>,
    /// Every group of files that has some, with their count and hash.
    pub(crate) files: BTreeMap<String, FileGroup>,
}

impl BackupManifest {
    /// How many rows all tables have.
    pub(crate) fn rows(&self) -> u64 {
        self.tables.iter().map(|table| table.rows).sum()
    }

    /// How many files, folders and links there are.
    pub(crate) fn entries(&self) -> u64 {
        self.files.values().map(|group| group.entries).sum()
    }
}

/// The files, folders and links of one folder of the home.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileGroup {
    /// How many there are.
    pub(crate) entries: u64,
    /// The size of the files, in bytes.
    pub(crate) bytes: u64,
    /// The sum of the hashes of all entries, modulo 2^256, little-endian, as hexadecimal digits.
    pub(crate) sha256: String,
}

/// Counts and hashes files, group by group.
#[derive(Debug, Default)]
pub(crate) struct FileDigests(BTreeMap<String, (RowDigest, u64)>);

impl FileDigests {
    /// Adds an entry.
    pub(crate) fn add(&mut self, path: &HomePath, hash: &[u8; 32], bytes: u64) {
        let (digest, total) = self.0.entry(path.group().to_owned()).or_default();
        digest.add_hash(hash);
        *total += bytes;
    }

    /// The counts and hashes of all groups.
    pub(crate) fn groups(&self) -> BTreeMap<String, FileGroup> {
        let group = |(digest, bytes): &(RowDigest, u64)| FileGroup {
            entries: digest.rows(),
            bytes: *bytes,
            sha256: digest.to_hex(),
        };
        self.0
            .iter()
            .map(|(name, digest)| (name.clone(), group(digest)))
            .collect()
    }
}

/// Hashes one entry of a home: its path, kind and permissions, and its content as it is read.
pub(crate) struct EntryHasher<R> {
    content: R,
    hasher: Sha256,
    read: u64,
}

/// What an entry of a home is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HomeEntryKind {
    /// A file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link with this target.
    Link(Vec<u8>),
}

impl<R> EntryHasher<R> {
    pub(crate) fn new(path: &HomePath, kind: &HomeEntryKind, mode: u32, content: R) -> Self {
        let mut hasher = Sha256::new();
        let (name, target) = match kind {
            HomeEntryKind::File => (b'f', &b""[..]),
            HomeEntryKind::Folder => (b'd', &b""[..]),
            HomeEntryKind::Link(target) => (b'l', target.as_slice()),
        };
        hasher.update([name]);
        hasher.update(mode.to_le_bytes());
        for part in [path.as_bytes(), target] {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self {
            content,
            hasher,
            read: 0,
        }
    }

    /// The hash, and how many bytes of content were read.
    pub(crate) fn finish(self) -> ([u8; 32], u64) {
        (self.hasher.finalize().into(), self.read)
    }
}

impl<R: Read> Read for EntryHasher<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.content.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        self.read += read as u64;
        Ok(read)
    }
}
