//! Describes an algorithm of cuBLASLt: tile, stages, cluster and split-K.

use std::fmt;

use cudarc::cublaslt::sys::{
    cublasLtClusterShape_t as Cluster, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t as Attribute, cublasLtMatmulAlgoConfigGetAttribute,
    cublasLtMatmulStages_t as Stages, cublasLtMatmulTile_t as Tile,
};

/// An algorithm. Its text names tile, stages, cluster and split of the sums, for example `tile
/// 128x256, stages 64xAUTO, cluster 2x1x1, split-K 1`; for cuBLASLt, which computes the transpose,
/// the first number of a shape counts columns of C.
pub struct Algorithm(pub cublasLtMatmulAlgo_t);

impl Algorithm {
    /// Returns an attribute of type `T`; `None` if this algorithm has none.
    fn attribute<T: Default>(&self, attribute: Attribute) -> Option<T> {
        let (mut value, mut written) = (T::default(), 0);
        // SAFETY: `value` has the size that is passed.
        let status = unsafe {
            cublasLtMatmulAlgoConfigGetAttribute(
                &raw const self.0,
                attribute,
                (&raw mut value).cast(),
                size_of::<T>(),
                &raw mut written,
            )
        };
        (status.result().is_ok() && written == size_of::<T>()).then_some(value)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Attribute::*;
        let id = |attribute| self.attribute::<u32>(attribute);
        let cluster = self.attribute::<u16>(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
        let parts = self.attribute::<i32>(CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
        write!(
            f,
            "tile {}, stages {}, cluster {}, split-K {}",
            tile(id(CUBLASLT_ALGO_CONFIG_TILE_ID)),
            stages(id(CUBLASLT_ALGO_CONFIG_STAGES_ID)),
            shape_of_cluster(cluster.map(u32::from)),
            parts.map_or("-".to_owned(), |parts| parts.to_string()),
        )?;
        match id(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) {
            None | Some(0) => Ok(()),
            Some(2) => write!(f, " summed in f32"),
            Some(other) => write!(f, ", reduction scheme {other}"),
        }
    }
}

fn tile(id: Option<u32>) -> String {
    // SAFETY: the enumeration has every number below its end.
    unsafe { name::<Tile>(id, Tile::CUBLASLT_MATMUL_TILE_END as u32, &[]) }
}

fn stages(id: Option<u32>) -> String {
    // SAFETY: the enumeration has every number below its end, except 29 and 30.
    unsafe { name::<Stages>(id, Stages::CUBLASLT_MATMUL_STAGES_END as u32, &[29, 30]) }
}

fn shape_of_cluster(id: Option<u32>) -> String {
    // SAFETY: the enumeration has every number below its end, except 1.
    unsafe { name::<Cluster>(id, Cluster::CUBLASLT_CLUSTER_SHAPE_END as u32, &[1]) }
}

/// Returns the last part of the enumerator's name, such as `128x256` of
/// `CUBLASLT_MATMUL_TILE_128x256`; the number if a newer library has added it.
///
/// # Safety
///
/// `E` is one of the library's enumerations, with the numbers below `end` but for `missing`.
unsafe fn name<E: fmt::Debug>(id: Option<u32>, end: u32, missing: &[u32]) -> String {
    const { assert!(size_of::<E>() == size_of::<u32>()) };
    let Some(id) = id else { return "-".to_owned() };
    if id >= end || missing.contains(&id) {
        return id.to_string();
    }
    // SAFETY: the caller passes the numbers of all enumerators, which are represented as `u32`.
    let name = format!("{:?}", unsafe { std::mem::transmute_copy::<u32, E>(&id) });
    name.rsplit('_').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_the_names_of_the_header() {
        let tiles = [Some(15), Some(23), Some(24), Some(36), Some(0), None].map(tile);
        assert_eq!(tiles, ["64x64", "128x256", "256x128", "8x128", "UNDEFINED", "-"]);
        assert_eq!([16, 35].map(|id| stages(Some(id))), ["64x4", "64xAUTO"]);
        assert_eq!(
            [0, 2, 3, 6].map(|id| shape_of_cluster(Some(id))),
            ["AUTO", "1x1x1", "2x1x1", "2x2x1"]
        );
    }

    #[test]
    fn ids_of_a_newer_library_are_numbers() {
        assert_eq!((tile(Some(5000)), stages(Some(29))), ("5000".to_owned(), "29".to_owned()));
        assert_eq!((stages(Some(99)), shape_of_cluster(Some(1))), ("99".into(), "1".into()));
    }
}
