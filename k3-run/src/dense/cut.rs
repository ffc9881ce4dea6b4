//! Some rows of a matrix: what to read of its file, and how to see it in a buffer.

use std::ops::Range;

use k3_formats::container::MatrixPlace;
use k3_formats::quant::MatrixFormat;

use crate::experts::DIRECT_ALIGN;
use crate::kernels::Matrix;

/// One read of whole blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Window {
    /// Offset in the file, on a block.
    pub(super) offset: u64,
    /// Where it goes in the buffer.
    pub(super) at: Range<usize>,
    /// Bytes of it that are wanted; the rest fills up the last block.
    pub(super) needed: usize,
}

/// Consecutive rows of one matrix.
#[derive(Debug, Clone)]
pub(super) struct Cut {
    pub(super) file: usize,
    pub(super) windows: Vec<Window>,
    format: MatrixFormat,
    rows: usize,
    cols: usize,
    codes: Range<usize>,
    scales: Range<usize>,
}

impl Cut {
    /// `rows` of the matrix at `place`. Codes and scales that lie side by side are read
    /// in one go.
    pub(super) fn new(place: &MatrixPlace, rows: Range<usize>) -> Self {
        let (format, cols) = (place.format, place.cols);
        let part = |all: &Range<u64>, per_row: usize| {
            all.start + (rows.start * per_row) as u64..all.start + (rows.end * per_row) as u64
        };
        let codes = part(&place.codes, format.code_bytes_per_row(cols));
        let scales = part(&place.scales, format.scale_bytes_per_row(cols));
        let mut cut = Self {
            file: place.file,
            windows: Vec::with_capacity(2),
            format,
            rows: rows.len(),
            cols,
            codes: 0..0,
            scales: 0..0,
        };
        let gap = scales.start.checked_sub(codes.end);
        if scales.is_empty() {
            cut.codes = cut.window(codes);
        } else if gap.is_some_and(|gap| gap < DIRECT_ALIGN as u64) {
            let (length, width) = (scales.start - codes.start, scales.end - scales.start);
            let both = cut.window(codes.start..scales.end);
            cut.codes = both.start..both.start + (codes.end - codes.start) as usize;
            let at = both.start + length as usize;
            cut.scales = at..at + width as usize;
        } else {
            cut.codes = cut.window(codes);
            cut.scales = cut.window(scales);
        }
        cut
    }

    /// Adds a read of `bytes` and returns where they will be in the buffer.
    fn window(&mut self, bytes: Range<u64>) -> Range<usize> {
        let block = DIRECT_ALIGN as u64;
        let offset = bytes.start / block * block;
        let (start, needed) = ((bytes.start - offset) as usize, (bytes.end - offset) as usize);
        let at = self.buffer_bytes();
        self.windows.push(Window {
            offset,
            at: at..at + needed.next_multiple_of(DIRECT_ALIGN),
            needed,
        });
        at + start..at + needed
    }

    /// Bytes of a buffer for it, whole blocks.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.windows.last().map_or(0, |w| w.at.end)
    }

    /// The rows as a matrix, in a buffer that its reads have filled.
    ///
    /// # Panics
    /// The buffer is too small.
    pub(super) fn view<'b>(&self, buffer: &'b [u8]) -> Matrix<'b> {
        let (codes, scales) = (&buffer[self.codes.clone()], &buffer[self.scales.clone()]);
        Matrix::from_bytes(self.format, self.rows, self.cols, codes, scales)
            .expect("the container was checked when it was opened")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(format: MatrixFormat, rows: usize, cols: usize, gap: u64) -> MatrixPlace {
        let codes = (rows * format.code_bytes_per_row(cols)) as u64;
        let scales = (rows * format.scale_bytes_per_row(cols)) as u64;
        let end = 8192 + codes;
        MatrixPlace {
            file: 3,
            rows,
            cols,
            format,
            codes: 8192..end,
            scales: end + gap..end + gap + scales,
        }
    }

    #[test]
    fn windows_are_whole_blocks_and_views_find_the_rows() {
        for (format, gap) in [
            (MatrixFormat::Int8Row, 32),
            (MatrixFormat::Int4G64, 9000),
            (MatrixFormat::Int4G32, 64),
            (MatrixFormat::Bf16, 0),
        ] {
            let place = place(format, 300, 192, gap);
            let file: Vec<u8> = (0..place.scales.end.max(place.codes.end) as usize)
                .map(|i| if i as u64 >= place.scales.start { 0 } else { (i % 251) as u8 })
                .collect();
            for rows in [0..300, 7..50, 299..300] {
                let cut = Cut::new(&place, rows.clone());
                let mut buffer = vec![0_u64; cut.buffer_bytes() / 8];
                let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut buffer);
                for window in &cut.windows {
                    assert!(window.offset.is_multiple_of(4096) && window.at.len() % 4096 == 0);
                    let from = window.offset as usize;
                    buffer[window.at.clone()][..window.needed]
                        .copy_from_slice(&file[from..from + window.needed]);
                }
                let whole = Cut::new(&place, 0..300);
                assert_eq!(whole.windows.len(), if gap == 9000 { 2 } else { 1 });
                let codes = place.codes.start as usize;
                let per_row = format.code_bytes_per_row(192);
                let view = cut.view(buffer);
                assert_eq!((view.rows(), view.cols()), (rows.len(), 192));
                let wanted = &file[codes + rows.start * per_row..codes + rows.end * per_row];
                assert_eq!(&buffer[cut.codes.clone()], wanted);
            }
        }
    }
}
