//! One hash of all files of a definition, by which two of them are compared without sending them.

use oubliette_protocol::library::DefinitionFiles;
use sha2::{Digest as _, Sha256};

/// The SHA-256 hash of a definition's files in the order of their paths: of each the length and bytes of its path, its mode,
/// the length and bytes of its content; numbers as 64 bits, little-endian. As hexadecimal digits.
pub(crate) fn definition_digest(definition: &DefinitionFiles) -> String {
    let mut files: Vec<_> = definition.files.iter().collect();
    files.sort_by(|one, other| one.path.cmp(&other.path));
    let mut hasher = Sha256::new();
    for file in files {
        hasher.update((file.path.len() as u64).to_le_bytes());
        hasher.update(file.path.as_bytes());
        hasher.update(u64::from(file.mode).to_le_bytes());
        hasher.update((file.content.len() as u64).to_le_bytes());
        hasher.update(&file.content);
    }
    hex::encode(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::library::{DefinitionKey, DefinitionKind, LibraryFile};

    use super::*;

    #[test]
    fn every_name_mode_and_byte_counts_and_the_order_does_not() {
        let digest = |files: &[(&str, u32, &str)]| {
            let file = |(path, mode, content): &(&str, u32, &str)| LibraryFile {
                path: (*path).into(),
                mode: *mode,
                content: content.as_bytes().to_vec(),
            };
            definition_digest(&DefinitionFiles {
                key: DefinitionKey::parse(DefinitionKind::Agent, "a").unwrap(),
                files: files.iter().map(file).collect(),
            })
        };
        let one = digest(&[("a", 0o600, "x"), ("b", 0o600, "")]);
        assert_eq!(one, digest(&[("b", 0o600, ""), ("a", 0o600, "x")]));
        for other in [
            &[("a", 0o600, "x")][..],
            &[("a", 0o700, "x"), ("b", 0o600, "")],
            &[("a", 0o600, ""), ("b", 0o600, "x")],
            &[("ab", 0o600, "x"), ("", 0o600, "")],
        ] {
            assert_ne!(one, digest(other), "{other:?}");
        }
    }
}
