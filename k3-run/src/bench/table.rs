//! The report for people.

use std::io::{self, Write};

use super::Spread;
use super::report::{Decode, PartShare, Prefill, Product, Report};

const GIGA: f64 = 1e9;

/// Median and range with `digits` decimals.
fn range(spread: Spread, digits: usize) -> String {
    let Spread { median, least, most } = spread;
    format!("{median:.digits$} ({least:.digits$} to {most:.digits$})")
}

fn percent(spread: Spread) -> String {
    format!("{} %", range(spread.map(|part| part * 100.0), 0))
}

impl Report {
    /// Prints tables: medians, and in brackets the range over the rounds.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let giga = |spread: Spread| range(spread.map(|rate| rate / GIGA), 2);
        writeln!(
            out,
            "machine   {}, {} threads, kernels {}",
            self.cpu, self.threads, self.kernels
        )?;
        writeln!(
            out,
            "model     {} layers, {:.3} GB dense, experts of {:.2} MB",
            self.layers,
            self.dense_bytes as f64 / GIGA,
            self.expert_bytes as f64 / 1e6
        )?;
        writeln!(out, "rounds    {}; medians, in brackets least to most", self.rounds)?;
        writeln!(out, "memory    {} GB/s read", giga(self.memory))?;
        writeln!(
            out,
            "peak      f32 {}, int8 {} G multiply-adds/s",
            range(self.peak_f32.map(|rate| rate / GIGA), 0),
            range(self.peak_int8.map(|rate| rate / GIGA), 0)
        )?;
        let through = if self.direct_io { "around" } else { "through" };
        for disk in &self.disk {
            let (rate, n) = (giga(disk.rate), disk.in_flight);
            writeln!(
                out,
                "drive     {rate} GB/s, {n} experts in flight, {through} the page cache"
            )?;
        }
        writeln!(out, "\nproducts                      one row: GB/s, of memory, one thread")?;
        writeln!(
            out,
            "                              {} rows: G multiply-adds/s, of peak",
            self.chunk
        )?;
        self.products.iter().try_for_each(|product| product.write(out))?;
        self.decode.iter().try_for_each(|decode| decode.write(out))?;
        self.prefill.iter().try_for_each(|prefill| prefill.write(out))
    }
}

impl Product {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let shape = &self.shape;
        let name = format!("{} {}x{}", shape.format, shape.rows, shape.cols);
        let inputs = if shape.act8 { "int8" } else { "exact" };
        let (rate, part) = (range(self.rate.map(|r| r / GIGA), 1), percent(self.of_memory));
        let single = range(self.one_thread_rate.map(|r| r / GIGA), 1);
        writeln!(out, "  {name:<21} {inputs:<5} {rate:<22} {part:<17} {single}")?;
        let (rate, part) = (range(self.chunk_rate.map(|r| r / GIGA), 0), percent(self.of_peak));
        writeln!(out, "  {:<27} {rate:<22} {part}", "")
    }
}

impl Decode {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let kept = if self.kept == 1 { "expert is" } else { "experts are" };
        writeln!(out, "\ndecode, {} {kept} kept", self.kept)?;
        writeln!(
            out,
            "  {} s/token, {:.2} tokens/s",
            range(self.seconds, 3),
            1.0 / self.seconds.median
        )?;
        writeln!(
            out,
            "  {} times the limit of memory and drive for {:.3} GB used, {:.3} GB read",
            range(self.of_limit, 2),
            self.bytes / GIGA,
            self.bytes_read / GIGA
        )?;
        writeln!(
            out,
            "  {:.1} % of experts from the cache; drive busy {} of the time",
            self.hit_rate * 100.0,
            percent(self.disk_busy)
        )?;
        if self.look_ahead.begun > 0.0 {
            writeln!(
                out,
                "  look-ahead: {:.1} experts a token, {:.1} of them used, {:.3} GB wasted",
                self.look_ahead.begun,
                self.look_ahead.used,
                self.look_ahead.wasted_bytes / GIGA
            )?;
        }
        if !self.look_ahead.right_by_rank.is_empty() {
            let right = self.look_ahead.right_by_rank.iter().map(|r| format!("{:.0}", r * 100.0));
            let right = right.collect::<Vec<_>>().join(" ");
            writeln!(out, "  guesses right by rank, %: {right}")?;
        }
        write_parts(&self.parts, out)
    }
}

impl Prefill {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "\nprefill of {} tokens", self.tokens)?;
        let work = range(self.work.map(|rate| rate / GIGA), 0);
        let rate = range(self.rate, 2);
        writeln!(out, "  {rate} tokens/s, {work} G multiply-adds/s in matrices")?;
        writeln!(out, "  {:.3} GB of experts read", self.bytes_read / GIGA)?;
        write_parts(&self.parts, out)
    }
}

fn write_parts(parts: &[PartShare], out: &mut impl Write) -> io::Result<()> {
    let part = |part: &PartShare| format!("{} {:.1} %", part.part, part.share * 100.0);
    writeln!(out, "  {}", parts.iter().map(part).collect::<Vec<_>>().join(", "))
}
