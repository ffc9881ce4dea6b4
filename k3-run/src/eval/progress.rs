//! A file of finished windows, so that an evaluation goes on where it was stopped.
//!
//! JSON lines: the first says what is evaluated, each further one is a window. A line that
//! was torn by a kill is written again.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::Context;
use fs_err::{File, OpenOptions};
use k3_formats::{Error, text_file};
use serde_json::Value;

use super::Window;

/// Longest progress file that is read, in bytes.
const MAX_FILE: u64 = 1 << 30;

const OTHER_FILE: &str = "give another file";

/// The open file.
#[derive(Debug)]
pub struct Progress {
    file: Option<File>,
}

impl Progress {
    /// Nothing is kept.
    pub fn none() -> Self {
        Self { file: None }
    }

    /// Opens or makes the file of the evaluation that `identity` describes, and returns the
    /// windows that are done, in order.
    ///
    /// # Errors
    /// The file belongs to another evaluation, or cannot be read or written.
    pub fn open(path: &Path, identity: &Value) -> anyhow::Result<(Self, Vec<Window>)> {
        let exists = path.try_exists().context("cannot look for the progress file")?;
        let bytes = if exists { text_file::read_bytes(path, MAX_FILE)? } else { Vec::new() };
        // Every byte counts, as the file is cut behind its last whole line.
        let text = String::from_utf8(bytes).map_err(|_| {
            Error::malformed("not the progress of an evaluation").in_file(path).hint(OTHER_FILE)
        })?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = text[..whole].lines();
        let mut windows = Vec::new();
        let first = lines.next().map(serde_json::from_str::<Value>);
        if whole == 0 && !text.is_empty() || first.as_ref().is_some_and(Result::is_err) {
            let error = Error::malformed("not the progress of an evaluation").in_file(path);
            return Err(error.hint(OTHER_FILE).into());
        }
        if let Some(Ok(first)) = &first
            && first != identity
        {
            let error = Error::mismatch("the progress of another evaluation").in_file(path);
            return Err(error.hint("give another file, or delete this one").into());
        }
        for line in lines {
            let window = serde_json::from_str(line).map_err(|e| {
                Error::malformed(format!("line {} is no window: {e}", windows.len() + 2))
                    .in_file(path)
                    .hint("delete the file to begin again")
            })?;
            windows.push(window);
        }
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        file.set_len(whole as u64)?;
        file.seek(SeekFrom::End(0))?;
        if first.is_none() {
            writeln!(file, "{identity}")?;
        }
        Ok((Self { file: Some(file) }, windows))
    }

    /// Records a window. What it returns is the window as it would be read again, so that
    /// an interrupted evaluation ends with the same digits as another.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn record(&mut self, window: &Window) -> anyhow::Result<Window> {
        let line = serde_json::to_string(window)?;
        if let Some(file) = &mut self.file {
            writeln!(file, "{line}")?;
            file.sync_data()?;
        }
        Ok(serde_json::from_str(&line)?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_evaluation_goes_on_after_whole_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("progress");
        let (mut progress, done) = Progress::open(&path, &json!({"text": 1})).unwrap();
        assert!(done.is_empty());
        let window = Window { tokens: 3, loss: 1.0 / 3.0, kl: 1e-300, ..Window::default() };
        let first = progress.record(&window).unwrap();
        progress.record(&Window::default()).unwrap();
        drop(progress);
        let text = fs_err::read_to_string(&path).unwrap();
        fs_err::write(&path, &text[..text.len() - 5]).unwrap();
        let (mut progress, done) = Progress::open(&path, &json!({"text": 1})).unwrap();
        assert_eq!(done, [first]);
        progress.record(&Window::default()).unwrap();
        assert_eq!(fs_err::read_to_string(&path).unwrap(), text);

        let other = Progress::open(&path, &json!({"text": 2})).unwrap_err();
        assert!(other.to_string().contains("the progress of another evaluation"));
        // A byte order mark is not ours, and would shift where the last line ends.
        fs_err::write(&path, "\u{feff}{\"text\":1}\n").unwrap();
        let other = Progress::open(&path, &json!({"text": 1})).unwrap_err();
        assert!(other.to_string().contains("not the progress of an evaluation"));
        fs_err::write(&path, "some poem").unwrap();
        let other = Progress::open(&path, &json!({"text": 1})).unwrap_err();
        assert!(other.to_string().contains("not the progress of an evaluation"));
        assert_eq!(fs_err::read_to_string(&path).unwrap(), "some poem");
    }
}
