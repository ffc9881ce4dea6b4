//! An inspection as tables.

use std::fmt;

use k3_formats::tensor_name::TensorClass;
use serde::Serialize;

use super::family::{EXPERTS, Family, OTHER, PADDING, VISION};
use super::{Inspection, Kind};
use crate::footprint::Footprint;
use crate::size::Thousands;

/// Name of the row that sums up the dense text classes.
const ALL_DENSE: &str = "all dense";

/// Totals of one class.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ClassRow {
    /// Name of the class.
    pub class: &'static str,
    /// Tensors.
    pub tensors: u64,
    /// Weights.
    pub params: u64,
    /// Bytes.
    pub bytes: u64,
    /// Bytes if the BF16 matrices among them were int8 with one scale per row.
    pub int8_bytes: u64,
    /// Bytes if they were int4 with one scale per 64 columns.
    pub int4_bytes: u64,
}

impl ClassRow {
    fn add(&mut self, other: &Self) {
        self.tensors += other.tensors;
        self.params += other.params;
        self.bytes += other.bytes;
        self.int8_bytes += other.int8_bytes;
        self.int4_bytes += other.int4_bytes;
    }

    fn is_text(&self) -> bool {
        TensorClass::ALL.iter().any(|c| c.name() == self.class)
    }
}

/// Totals by class, the dense text classes first.
pub(super) fn classes(families: &[Family]) -> Vec<ClassRow> {
    let names = TensorClass::ALL.map(TensorClass::name);
    let names = names.into_iter().chain([EXPERTS, VISION, PADDING, OTHER]);
    let mut rows: Vec<ClassRow> =
        names.map(|class| ClassRow { class, ..ClassRow::default() }).collect();
    for family in families {
        let Some(row) = rows.iter_mut().find(|row| row.class == family.class) else { continue };
        row.add(&ClassRow {
            class: family.class,
            tensors: family.count,
            params: family.params(),
            bytes: family.bytes,
            int8_bytes: family.quantized_bytes(8),
            int4_bytes: family.quantized_bytes(4),
        });
    }
    rows.retain(|row| row.tensors > 0);
    rows
}

impl Inspection {
    /// Sum of the dense text classes.
    fn text(&self) -> ClassRow {
        let mut sum = ClassRow { class: ALL_DENSE, ..ClassRow::default() };
        self.classes.iter().filter(|row| row.is_text()).for_each(|row| sum.add(row));
        sum
    }

    fn class(&self, name: &str) -> ClassRow {
        self.classes.iter().find(|row| row.class == name).cloned().unwrap_or_default()
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Snapshot => "snapshot",
            Kind::Container => "container",
            Kind::File => "safetensors file",
        };
        write!(f, "{kind}")?;
        if let Some(repo) = &self.source.repo {
            write!(f, " of {repo}")?;
        }
        if let Some(revision) = &self.source.revision {
            write!(f, ", revision {revision}")?;
        }
        if self.release {
            write!(f, "; sizes and headers are those of the release")?;
        }
        writeln!(
            f,
            "\n{} files, {} bytes; {} tensors, {} bytes; headers {} bytes\n",
            Thousands(self.files),
            Thousands(self.file_bytes),
            Thousands(self.tensors),
            Thousands(self.tensor_bytes),
            Thousands(self.file_bytes - self.tensor_bytes)
        )?;
        self.family_table(f)?;
        self.class_table(f)?;
        match (&self.footprint, self.kind) {
            (Some(footprint), Kind::Snapshot) => self.numbers(footprint, f),
            _ => Ok(()),
        }
    }
}

impl Inspection {
    fn family_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.families.iter().map(|x| x.name.len()).max().unwrap_or(0).max(4);
        let shapes: Vec<_> = self.families.iter().map(|x| format!("{:?}", x.shape)).collect();
        let shape_width = shapes.iter().map(String::len).max().unwrap_or(0).max(5);
        writeln!(
            f,
            "{:width$}  {:<9}  {:<5}  {:<shape_width$}  {:>7}  {:>21}",
            "name", "class", "dtype", "shape", "count", "bytes"
        )?;
        for (family, shape) in self.families.iter().zip(&shapes) {
            writeln!(
                f,
                "{:width$}  {:<9}  {:<5}  {shape:<shape_width$}  {:>7}  {:>21}",
                family.name,
                family.class,
                family.dtype,
                Thousands(family.count),
                Thousands(family.bytes)
            )?;
        }
        writeln!(f)
    }

    fn class_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What a container holds is quantized already.
        let quantizable = self.kind != Kind::Container;
        let row = |f: &mut fmt::Formatter<'_>, r: &ClassRow| {
            write!(f, "{:<10} {:>8} ", r.class, Thousands(r.tensors))?;
            if quantizable {
                write!(f, "{:>18} ", Thousands(r.params))?;
            }
            write!(f, "{:>18}", Thousands(r.bytes))?;
            if quantizable && (r.is_text() || r.class == ALL_DENSE) {
                write!(f, " {:>18} {:>18}", Thousands(r.int8_bytes), Thousands(r.int4_bytes))?;
            }
            writeln!(f)
        };
        write!(f, "{:<10} {:>8} ", "class", "tensors")?;
        if quantizable {
            write!(f, "{:>18} ", "params")?;
        }
        write!(f, "{:>18}", "bytes")?;
        if quantizable {
            write!(f, " {:>18} {:>18}", "as int8", "as int4")?;
        }
        writeln!(f)?;
        for class in self.classes.iter().filter(|r| r.is_text()) {
            row(f, class)?;
        }
        row(f, &self.text())?;
        let mut all = self.text();
        for class in self.classes.iter().filter(|r| !r.is_text()) {
            row(f, class)?;
            all.add(class);
        }
        all.class = "all";
        row(f, &all)
    }

    /// Sizes that people ask for before they download or buy anything.
    fn numbers(&self, x: &Footprint, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dense, experts) = (self.text().params, self.class(EXPERTS).params);
        let embedding = self.class(TensorClass::Embedding.name()).params;
        let vision = self.class(VISION).params;
        let token_experts = x.token_bytes.checked_div(x.expert_bytes).unwrap_or(0);
        let active = dense - embedding + token_experts * x.expert_params;
        writeln!(f)?;
        for (what, value) in [
            ("params, text", dense + experts),
            ("params, vision included", dense + experts + vision),
            ("params active per token, embedding not counted", active),
            ("bytes of one expert", x.expert_bytes),
            ("bytes of the experts of one layer", x.layer_experts_bytes),
            ("experts", x.experts),
            ("bytes of all experts", x.all_experts_bytes),
            ("bytes of experts per token and layer", x.token_layer_bytes),
            ("bytes of experts per token", x.token_bytes),
            ("bytes of KDA state per layer, f32", x.kda_state_layer_bytes),
            ("bytes of KDA state, f32", x.kda_state_bytes),
            ("bytes of convolution state, f32", x.conv_state_bytes),
            ("values of MLA cache per token", x.cache_values_per_token),
            ("bytes of MLA cache per token, f32", x.cache_bytes_per_token),
            ("bytes of AttnRes vectors per position in flight, f32", x.attn_res_bytes),
        ] {
            writeln!(f, "{what:<54} {:>20}", Thousands(value))?;
        }
        Ok(())
    }
}
