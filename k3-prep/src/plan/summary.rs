//! A plan in numbers.

use std::fmt;

use k3_formats::recipe::Recipe;
use k3_formats::tensor_name::{TensorClass, expert_bytes};
use serde::Serialize;

use super::ConversionPlan;
use crate::size::{Bytes, Thousands};

/// What a plan reads and writes, by class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlanSummary {
    /// How the matrices are quantized.
    pub recipe: Recipe,
    /// Decoder layers.
    pub layers: usize,
    /// Source shards.
    pub shards: usize,
    /// Dense tensors by class.
    pub classes: Vec<ClassTotals>,
    /// Bytes of dense tensors to be read.
    pub source_bytes: u64,
    /// Bytes of all files to be written, the manifest and the sums not counted.
    pub output_bytes: u64,
    /// Files to be written, the manifest and the sums not counted.
    pub output_files: usize,
    /// Routed experts, which stay where they are.
    pub experts: usize,
    /// Bytes of all routed experts.
    pub expert_bytes: u64,
    /// Experts whose six tensors are not one run.
    pub scattered_experts: usize,
    /// Vision tensors left out.
    pub left_out: usize,
}

/// Totals of one class of dense tensors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClassTotals {
    /// Name of the class.
    pub class: &'static str,
    /// Tensors in the snapshot.
    pub tensors: usize,
    /// Weights.
    pub params: u64,
    /// Bytes in the snapshot.
    pub source_bytes: u64,
    /// Bytes in the container, scales included, padding not.
    pub stored_bytes: u64,
    /// Number formats in the container.
    pub formats: Vec<&'static str>,
}

impl ConversionPlan {
    /// The plan in numbers.
    pub fn summary(&self) -> PlanSummary {
        let classes = TensorClass::ALL.into_iter().map(|class| self.class_totals(class));
        let experts = self.config.moe_layers().len() * self.config.moe.experts;
        PlanSummary {
            recipe: self.recipe.clone(),
            layers: self.config.layers(),
            shards: self.shards.len(),
            classes: classes.filter(|c| c.tensors > 0).collect(),
            source_bytes: self.source_bytes(),
            output_bytes: self.output_bytes(),
            output_files: self.dense.len() + self.small.len(),
            experts,
            expert_bytes: experts as u64 * expert_bytes(&self.config),
            scattered_experts: self.scattered_experts,
            left_out: self.left_out.len(),
        }
    }

    fn class_totals(&self, class: TensorClass) -> ClassTotals {
        let mut totals = ClassTotals {
            class: class.name(),
            tensors: 0,
            params: 0,
            source_bytes: 0,
            stored_bytes: 0,
            formats: Vec::new(),
        };
        for t in self.dense.iter().flat_map(|f| &f.tensors).filter(|t| t.spec.class == class) {
            totals.tensors += 1;
            totals.params += t.spec.elements();
            totals.source_bytes += t.spec.bytes();
            totals.stored_bytes += t.stored_bytes();
            let format = t.format.map_or("unchanged", |f| f.name());
            if !totals.formats.contains(&format) {
                totals.formats.push(format);
            }
        }
        totals
    }
}

impl super::PlannedTensor {
    /// Bytes in the container, scales included, padding not.
    pub fn stored_bytes(&self) -> u64 {
        match (self.format, self.spec.matrix_dims()) {
            (Some(format), Some((rows, cols))) => rows as u64 * format.bytes_per_row(cols) as u64,
            _ => self.spec.bytes(),
        }
    }
}

impl fmt::Display for PlanSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<10} {:>7} {:>16} {:>16} {:>16}  format",
            "class", "tensors", "params", "source bytes", "stored bytes"
        )?;
        let mut sum = (0, 0, 0, 0);
        for c in &self.classes {
            let formats = c.formats.join(", ");
            row(f, c.class, (c.tensors, c.params, c.source_bytes, c.stored_bytes), &formats)?;
            sum = (
                sum.0 + c.tensors,
                sum.1 + c.params,
                sum.2 + c.source_bytes,
                sum.3 + c.stored_bytes,
            );
        }
        row(f, "all", sum, "")?;
        writeln!(
            f,
            "reads {} of dense tensors from {} shards, writes {} in {} files",
            Bytes(self.source_bytes),
            self.shards,
            Bytes(self.output_bytes),
            self.output_files + 2,
        )?;
        write!(
            f,
            "{} experts of {} layers stay in the shards: {}",
            Thousands(self.experts as u64),
            self.layers,
            Bytes(self.expert_bytes)
        )?;
        if self.scattered_experts > 0 {
            write!(f, "\n{} experts are not one run: six reads each", self.scattered_experts)?;
        }
        if self.left_out > 0 {
            write!(f, "\n{} vision tensors are left out", self.left_out)?;
        }
        Ok(())
    }
}

fn row(
    f: &mut fmt::Formatter<'_>,
    class: &str,
    (tensors, params, source, stored): (usize, u64, u64, u64),
    formats: &str,
) -> fmt::Result {
    let line = format!(
        "{class:<10} {tensors:>7} {:>16} {:>16} {:>16}  {formats}",
        Thousands(params),
        Thousands(source),
        Thousands(stored)
    );
    writeln!(f, "{}", line.trim_end())
}
