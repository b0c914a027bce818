//! What a comparison makes of its rows besides tables and files of rows: a plot, and a comparison
//! with an earlier run.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use crate::base::output::{validate_output, write};
use crate::report::compare::{self, Comparison};
use crate::report::plot;
use crate::report::row::Row;
use crate::report::table::Report;

/// Flags of documents.
#[derive(Args, Clone, Debug)]
pub struct DocumentOptions {
    /// Also draw the rows: latency and bandwidth by size, or the rate of each shape
    #[arg(long, value_name = "SVG", conflicts_with = "simulate")]
    plot: Option<PathBuf>,

    /// Compare with an earlier run, a file that --json wrote: exit status 1 if a row became slower
    /// by more than noise
    #[arg(long, value_name = "JSON", conflicts_with = "simulate")]
    compare: Option<PathBuf>,
}

/// The documents of a run.
#[derive(Debug, Default)]
pub struct Documents {
    plot: Option<PathBuf>,
    /// The rows of an earlier run.
    earlier: Option<Vec<Report<Row>>>,
}

impl DocumentOptions {
    /// Reads the earlier run, before the new one begins.
    ///
    /// # Errors
    ///
    /// A file that is no run, or a plot that cannot be written.
    pub fn read(&self) -> Result<Documents> {
        validate_output("--plot", self.plot.as_deref())?;
        let earlier = self.compare.as_deref().map(compare::starts).transpose()?;
        Ok(Documents { plot: self.plot.clone(), earlier })
    }
}

impl Documents {
    /// Writes the plot and prints the comparison. Rows that became slower are an error.
    pub fn publish(&self, report: &Report<Row>) -> Result<()> {
        if let Some(path) = &self.plot {
            write(path, &plot::svg(report).context("there are no times to draw")?)?;
        }
        match &self.earlier {
            Some(earlier) => Comparison::of(earlier, std::slice::from_ref(report))?.publish(),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn a_run_is_drawn_and_compared_with_an_earlier_one() {
        let folder = tempfile::tempdir().unwrap();
        let measurements = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/measurements");
        let (json, svg) = (measurements.join("gemm-h200-odd.json"), folder.path().join("a.svg"));
        let options = DocumentOptions { plot: Some(svg.clone()), compare: Some(json.clone()) };
        let mut report = Report::read(&json).unwrap();
        options.read().unwrap().publish(&report).unwrap();
        assert!(fs::read_to_string(&svg).unwrap().contains("4097x4095x4088"));

        report.rows[0].time_us = report.rows[0].time_us.map(|us| 1.1 * us);
        let error = options.read().unwrap().publish(&report).unwrap_err().to_string();
        assert_eq!(error, "1 of 8 rows became slower");
        report.rows.iter_mut().for_each(|row| row.time_us = None);
        let error = options.read().unwrap().publish(&report).unwrap_err().to_string();
        assert_eq!(error, "there are no times to draw");
    }
}
