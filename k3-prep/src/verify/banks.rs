//! Are the banks of a pack whole, and if asked, still what was copied, byte by byte?

use std::path::{Path, PathBuf};

use k3_formats::container::Container;
use k3_formats::container::manifest::Manifest;
use k3_formats::digest::Hasher;
use k3_formats::pack::{BankRecord, PACK_FILE, Pack, PackHeader};
use k3_formats::{Error, Result};
use rayon::prelude::*;

use super::{BanksReport, Findings, Verification};
use crate::block_reader::{BlockReader, Pages};
use crate::progress::Progress;

/// The first of the folders that has a pack.
pub(super) fn folder(snapshots: &[PathBuf]) -> Option<&Path> {
    snapshots.iter().map(PathBuf::as_path).find(|dir| dir.join(PACK_FILE).is_file())
}

/// Compares the list with the container, the size of every bank with the list, and with
/// `--experts` all bytes with the digests.
pub(super) fn check(
    verification: &Verification<'_>,
    container: &Container,
    dir: &Path,
    snapshots: &[PathBuf],
    found: &mut Findings,
) -> BanksReport {
    let mut report = BanksReport { all: container.config.moe_layers().len(), ..Default::default() };
    let pack = match listed(container, dir, found) {
        Ok(pack) => pack,
        Err(error) => {
            found.differs(&error);
            return report;
        }
    };
    let mut whole = Vec::new();
    for bank in &pack.banks {
        match place(bank, snapshots) {
            Ok(path) => whole.push((bank, path)),
            Err(error) => found.differs(&error),
        }
    }
    report.whole = whole.len();
    if verification.experts {
        let bytes = whole.len() as u64 * pack.header.bank_bytes();
        let progress = Progress::start("hash banks", bytes, verification.talk);
        let outcomes: Vec<Vec<Error>> = verification.pool.install(|| {
            let check = |(bank, path): &(&BankRecord, PathBuf)| {
                contents(container, &pack.header, bank, path, &progress)
            };
            whole.par_iter().map(check).collect()
        });
        progress.finish();
        report.bytes = bytes;
        for errors in outcomes {
            report.equal += usize::from(errors.is_empty());
            errors.iter().for_each(|error| found.differs(error));
        }
    }
    report
}

fn listed(container: &Container, dir: &Path, found: &mut Findings) -> Result<Pack> {
    let Manifest { source, shards, .. } = &container.manifest;
    let wanted = PackHeader::new(&container.config, source, shards);
    let list = dir.join(PACK_FILE);
    let pack = Pack::read(dir)?.ok_or_else(|| Error::missing("no such file").in_file(&list))?;
    if let Some(difference) = pack.header.difference(&wanted) {
        return Err(Error::mismatch(difference).in_file(list));
    }
    if !pack.header.same_times(&wanted) {
        found.note("the shards had other times of change when the experts were packed");
    }
    pack.complete().map_err(|e| e.in_file(dir))?;
    Ok(pack)
}

/// Where a bank is with the size it should have.
fn place(bank: &BankRecord, dirs: &[PathBuf]) -> Result<PathBuf> {
    let path = super::shards::find(&bank.name, bank.size, dirs);
    let path = path.ok_or_else(|| Error::missing("the bank is not there").in_file(&bank.name))?;
    let size = fs_err::metadata(&path).map_err(|e| Error::io(&path, "look at", e))?.len();
    if size != bank.size {
        let problem = format!("expected {} bytes, found {size}", bank.size);
        return Err(Error::mismatch(problem).in_file(path));
    }
    Ok(path)
}

/// What in a bank is not what was copied, each expert by name.
fn contents(
    container: &Container,
    header: &PackHeader,
    bank: &BankRecord,
    path: &Path,
    progress: &Progress,
) -> Vec<Error> {
    let mut errors = Vec::new();
    let reader = match BlockReader::open(path, Pages::Drop) {
        Ok(reader) => reader,
        Err(error) => return vec![error],
    };
    let mut hasher = Hasher::new();
    // The header is that of this container's config, which bounds an expert.
    let mut expert = vec![0; header.stride as usize];
    for (number, &recorded) in bank.crc32.0.iter().enumerate() {
        let offset = number as u64 * header.stride;
        if let Err(error) = reader.read(&mut expert, offset) {
            errors.push(error);
            return errors;
        }
        hasher.update(&expert);
        let sum = crc32fast::hash(&expert[..header.expert_bytes as usize]);
        let converted = container.experts.checksum(bank.layer, number);
        for (expected, when) in [(Some(recorded), "copied"), (converted, "at the conversion")] {
            if let Some(expected) = expected.filter(|&expected| expected != sum) {
                let problem = format!(
                    "expected CRC-32 {expected:08x} as {when}, found {sum:08x} at byte {offset}"
                );
                let item = format!("layer {} expert {number}", bank.layer);
                errors.push(Error::mismatch(problem).item(item).in_file(path));
                break;
            }
        }
        progress.add(header.stride);
    }
    let found = hasher.finish();
    if found != bank.sha256 && errors.is_empty() {
        let problem = format!("expected SHA-256 {}, found {found}", bank.sha256);
        errors.push(Error::mismatch(problem).in_file(path));
    }
    errors
}
