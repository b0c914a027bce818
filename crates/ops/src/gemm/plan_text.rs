//! The text of plans of products.

use devcomm_kernels::gemm::gemm_swapped::Cluster;

use super::plan::{GemmPlan, Tiling};
use crate::plan::{Field, PlanText, plan_text};

plan_text!(GemmPlan);

impl PlanText for GemmPlan {
    const FORMS: &'static str = "portable, wide, or swapped or \
        unswapped:<rows>x<columns>:<splits>, which :<across>x<down> and then :<slices> may follow";

    const NAMES: &'static [(&'static str, Self)] =
        &[("portable", Self::Portable), ("wide", Self::Wide)];

    fn from_fields(name: &str, fields: &[Field]) -> Option<Self> {
        let &[(rows, Some(columns)), (splits, None), ref shares @ ..] = fields else { return None };
        let (across, down, slices) = match *shares {
            [] => (1, 1, 1),
            [(across, Some(down))] => (across, down, 1),
            [(across, Some(down)), (slices, None)] => (across, down, slices),
            _ => return None,
        };
        let cluster = Cluster { splits, across, down };
        let tiling = Tiling { rows, columns, cluster, slices };
        let plan = match name {
            "swapped" => Self::Swapped(tiling),
            "unswapped" => Self::Unswapped(tiling),
            _ => return None,
        };
        plan.is_known().then_some(plan)
    }

    fn fields(self) -> (&'static str, Vec<Field>) {
        let (name, tiling) = match self {
            Self::Swapped(tiling) => ("swapped", tiling),
            Self::Unswapped(tiling) => ("unswapped", tiling),
            Self::Portable | Self::Wide => return Default::default(),
        };
        let Tiling { rows, columns, cluster: Cluster { splits, across, down }, slices } = tiling;
        let mut fields = vec![(rows, Some(columns)), (splits, None)];
        if across * down * slices > 1 {
            fields.push((across, Some(down)));
        }
        if slices > 1 {
            fields.push((slices, None));
        }
        (name, fields)
    }
}
