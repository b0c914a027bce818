//! Reads the links between a host's GPUs from nvidia-smi.

use std::process::Command;

/// Returns the links between these GPUs (nvidia-smi's indices): such as `NV18`, or
/// `NV18 and SYS` if they differ; `None` for one GPU, and without nvidia-smi.
pub fn between(ordinals: &[String]) -> Option<String> {
    if ordinals.len() < 2 {
        return None;
    }
    let output = Command::new("nvidia-smi").args(["topo", "-m"]).output().ok()?;
    let matrix =
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())?;
    parse_matrix(&matrix, ordinals)
}

/// Parses the matrix of `nvidia-smi topo -m`. A GPU's row has its name and its links to GPU 0, 1
/// and so on.
fn parse_matrix(matrix: &str, ordinals: &[String]) -> Option<String> {
    let ours: Vec<usize> = ordinals.iter().filter_map(|ordinal| ordinal.parse().ok()).collect();
    let mut links: Vec<&str> = Vec::new();
    for line in matrix.lines() {
        let mut words = line.split_whitespace();
        let gpu = words.next().and_then(|word| word.strip_prefix("GPU")?.parse().ok());
        let Some(gpu) = gpu.filter(|gpu| ours.contains(gpu)) else { continue };
        let row: Vec<&str> = words.collect();
        // The heading may also begin with a GPU's name.
        if row.get(gpu) != Some(&"X") {
            continue;
        }
        links
            .extend(ours.iter().filter(|other| **other != gpu).filter_map(|other| row.get(*other)));
    }
    links.sort_unstable();
    links.dedup();
    (!links.is_empty()).then(|| links.join(" and "))
}

/// Returns the GB/s from one GPU to the others, in one direction, as NVIDIA specifies it for `NVn`,
/// that is n links of NVLink: 25 per link of NVLink 3 and 4, 50 per link of NVLink 5.
pub fn bandwidth(gpu: &str, links: &str) -> Option<f64> {
    const PER_LINK: [(&str, f64); 5] =
        [("A100", 25.0), ("H100", 25.0), ("H200", 25.0), ("B200", 50.0), ("B300", 50.0)];
    let n: u32 = links.strip_prefix("NV")?.parse().ok()?;
    let (_, per_link) = PER_LINK.iter().find(|(name, _)| gpu.contains(name))?;
    Some(f64::from(n) * per_link)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MATRIX: &str = "\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPIX\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPXB\tPIX\tSYS\t X
";

    fn links(ordinals: &[&str]) -> Option<String> {
        parse_matrix(
            MATRIX,
            &ordinals.iter().map(|&ordinal| ordinal.to_owned()).collect::<Vec<_>>(),
        )
    }

    #[test]
    fn links_are_read_from_nvidia_smis_matrix() {
        assert_eq!(links(&["0", "1"]).as_deref(), Some("NV18"));
        assert_eq!(links(&["0", "1", "2"]).as_deref(), Some("NV18 and SYS"));
        assert_eq!(
            parse_matrix(&MATRIX.replace("\x1b[4m", ""), &["0".into(), "2".into()]).as_deref(),
            Some("SYS")
        );
    }

    #[test]
    fn the_bandwidth_of_links_is_known_for_nvlink() {
        assert_eq!(bandwidth("NVIDIA H200", "NV18"), Some(450.0));
        assert_eq!(bandwidth("NVIDIA GB200", "NV18"), Some(900.0));
        for (gpu, links) in [("NVIDIA H200", "SYS"), ("NVIDIA H200", "NV18 and SYS"), ("L4", "NV4")]
        {
            assert_eq!(bandwidth(gpu, links), None);
        }
    }

    #[test]
    fn one_gpu_or_names_that_are_no_numbers_have_no_links() {
        assert_eq!(links(&["0"]), None);
        assert_eq!(links(&["GPU-8f6d", "GPU-77aa"]), None);
    }
}
