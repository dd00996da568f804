//! Which calls are open, where it outlives the server: a file in memory that both sides hold.
//!
//! While the server has the agent's streams, it alone knows which calls it has taken. Were it killed, nobody
//! could tell the agent that they will not be answered. So it notes the id of each call it takes, and takes
//! the note back when the answer has been written; the client reads what is left.

use std::{
    fs::File,
    io,
    ops::Range,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
};

use parking_lot::Mutex;
use rmcp::model::RequestId;
use rustix::fs::{MemfdFlags, SealFlags};

/// How many slots there are: the first says whether something is being written that may be cut off, and how much
/// of the client's words has been written; each other is a call's. A call too many goes by the client, which has
/// limits of its own.
const SLOTS: u16 = 1024;
/// The room of one id and its length.
const SLOT: usize = 64;

/// The server's side. Notes are made in memory and saved together.
#[derive(Debug)]
pub struct Journal {
    file: File,
    pages: Mutex<Pages>,
}

#[derive(Debug)]
struct Pages {
    /// Slots that were given back.
    free: Vec<u16>,
    /// The first that was never given.
    fresh: u16,
    /// What the file should hold, as far as it was ever used.
    image: Vec<u8>,
    /// What of it the file does not hold yet.
    unsaved: Range<usize>,
}

/// Where the first slot has the count of the client's bytes that were written.
const PASSED: usize = 8;

/// A call that is noted.
#[derive(Debug)]
#[must_use]
pub(crate) struct Note(u16);

impl Journal {
    /// An empty one. Its size is sealed, so that the other side cannot make writing fail or grow.
    pub fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("oubliette-open-calls", flags)?);
        file.set_len(u64::from(SLOTS) * SLOT as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self {
            file,
            pages: Mutex::new(Pages {
                free: Vec::new(),
                fresh: 1,
                image: Vec::new(),
                unsaved: 0..0,
            }),
        })
    }

    /// For the client.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Notes a call; none when there is no room for it.
    pub(crate) fn note(&self, id: &RequestId) -> Option<Note> {
        let mut slot = [0; SLOT];
        let mut rest = &mut slot[1..];
        serde_json::to_writer(&mut rest, id).ok()?;
        let length = SLOT - 1 - rest.len();
        slot[0] = u8::try_from(length).ok()?;
        let mut pages = self.pages.lock();
        let at = pages.slot()?;
        pages.put(at, &slot[..=length]);
        Some(Note(at))
    }

    /// Takes notes back.
    pub(crate) fn strike(&self, notes: impl IntoIterator<Item = Note>) {
        let mut pages = self.pages.lock();
        for Note(at) in notes {
            pages.put(at, &[0]);
            pages.free.push(at);
        }
    }

    /// Something is written from now on that may be cut off, or is written.
    pub(crate) fn writing(&self, is: bool) {
        self.pages.lock().put(0, &[u8::from(is)]);
        self.save();
    }

    /// So many bytes of what the client said have been written.
    pub(crate) fn passed(&self, bytes: u64) {
        self.pages.lock().put_at(PASSED, &bytes.to_le_bytes());
    }

    /// Brings the file up to date.
    pub(crate) fn save(&self) {
        let mut pages = self.pages.lock();
        let unsaved = std::mem::take(&mut pages.unsaved);
        if !unsaved.is_empty() {
            // A file in memory of a sealed size takes what is within it.
            let _ = self
                .file
                .write_all_at(&pages.image[unsaved.clone()], unsaved.start as u64);
        }
    }
}

impl Pages {
    fn slot(&mut self) -> Option<u16> {
        self.free.pop().or_else(|| {
            let at = self.fresh;
            self.fresh = (at + 1).min(SLOTS);
            (at < SLOTS).then_some(at)
        })
    }

    fn put(&mut self, at: u16, bytes: &[u8]) {
        self.put_at(usize::from(at) * SLOT, bytes);
    }

    fn put_at(&mut self, start: usize, bytes: &[u8]) {
        let end = (start / SLOT + 1) * SLOT;
        if self.image.len() < end {
            self.image.resize(end, 0);
        }
        let here = start..start + bytes.len();
        self.image[here.clone()].copy_from_slice(bytes);
        self.unsaved = match self.unsaved.is_empty() {
            true => here,
            false => self.unsaved.start.min(here.start)..self.unsaved.end.max(here.end),
        };
    }
}

/// The client's side.
pub(crate) struct Reader(File);

impl Reader {
    pub(crate) fn new(file: OwnedFd) -> Self {
        Self(file.into())
    }

    /// The calls that were noted and not taken back.
    pub(crate) fn left(&self) -> io::Result<Vec<RequestId>> {
        let mut slots = vec![0; usize::from(SLOTS) * SLOT];
        self.0.read_exact_at(&mut slots, 0)?;
        let ids = slots.chunks_exact(SLOT).skip(1).filter_map(|slot| {
            let id = slot.get(1..=usize::from(slot[0])).filter(|id| !id.is_empty())?;
            serde_json::from_slice(id).ok()
        });
        Ok(ids.collect())
    }

    /// How much of what the client said has been written.
    pub(crate) fn passed(&self) -> u64 {
        let mut bytes = [0; 8];
        match self.0.read_exact_at(&mut bytes, PASSED as u64) {
            Ok(()) => u64::from_le_bytes(bytes),
            Err(_) => 0,
        }
    }

    /// Whether what was written last may have been cut off.
    pub(crate) fn cut(&self) -> bool {
        let mut first = [0];
        self.0.read_exact_at(&mut first, 0).is_err() || first != [0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_and_not_taken_back_is_left() {
        let journal = Journal::new().unwrap();
        let reader = Reader::new(journal.file().try_clone_to_owned().unwrap());
        let left = || {
            journal.save();
            reader.left().unwrap()
        };
        assert_eq!(left(), []);
        let number = RequestId::Number(7);
        let text = RequestId::String("a \"b\" ü".into());
        let first = journal.note(&number).unwrap();
        let second = journal.note(&text).unwrap();
        assert_eq!(left(), [number, text.clone()]);
        journal.strike([first]);
        assert_eq!(left(), [text]);
        journal.strike([second]);
        assert_eq!(left(), []);
        assert!(!reader.cut());
        journal.writing(true);
        assert!(reader.cut());
        journal.writing(false);
        assert!(!reader.cut());
        assert_eq!(reader.passed(), 0);
        journal.passed(1 << 40);
        journal.save();
        assert_eq!(reader.passed(), 1 << 40);
        assert!(!reader.cut());
        assert_eq!(left(), []);
    }

    #[test]
    fn an_id_too_long_and_a_call_too_many_have_no_room() {
        let journal = Journal::new().unwrap();
        assert!(
            journal
                .note(&RequestId::String("x".repeat(SLOT).into()))
                .is_none()
        );
        let notes: Vec<_> = (1..i64::from(SLOTS))
            .map(|id| journal.note(&RequestId::Number(id)).unwrap())
            .collect();
        assert!(journal.note(&RequestId::Number(-1)).is_none());
        journal.strike(notes);
        let note = journal.note(&RequestId::Number(-1)).unwrap();
        journal.strike([note]);
    }

    #[test]
    fn the_other_side_cannot_change_its_size() {
        let journal = Journal::new().unwrap();
        let theirs = File::from(journal.file().try_clone_to_owned().unwrap());
        assert!(theirs.set_len(0).is_err());
        assert!(theirs.set_len(1 << 30).is_err());
    }
}
