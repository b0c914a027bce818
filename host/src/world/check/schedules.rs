//! The schedules of a check, one after another.

use devcomm_sim::{Activity, Lag, Simulation};

/// The environment variable that replaces the number of schedules of a series.
const VARIABLE: &str = "DEVCOMM_SCHEDULES";

/// Schedules of one kind.
#[derive(Clone, Copy, Debug)]
pub(super) enum Series {
    InOrder,
    Random(u64),
    Pct { schedules: u64, depth: u32 },
    Lagging(u64),
    Exhaustive { limit: u64 },
}

/// The schedules to run.
pub(super) struct Plan<'a> {
    simulation: &'a Simulation,
    series: &'a [Series],
    /// The number of schedules of a series, from the environment.
    schedules: Option<u64>,
}

/// Runs one schedule; `None` if it has failed, and others are to run nevertheless.
type Run<'a> = dyn FnMut(&Simulation) -> Result<Option<Activity>, String> + 'a;

impl<'a> Plan<'a> {
    /// # Errors
    ///
    /// The message for a variable that is no number.
    pub(super) fn new(simulation: &'a Simulation, series: &'a [Series]) -> Result<Self, String> {
        let series = if series.is_empty() { &[Series::InOrder] } else { series };
        Ok(Self { simulation, series, schedules: schedules(std::env::var_os(VARIABLE))? })
    }

    /// Returns whether the fixed orders run without weak loads, since those need a seed.
    fn omits_weak(&self) -> bool {
        self.simulation.is_weak() && self.simulation.random_seed().is_none()
    }

    /// Returns what no schedule shows, although the settings ask for it.
    pub(super) fn note(&self) -> Option<&'static str> {
        let fixed = self.series.iter().all(|series| matches!(series, Series::InOrder));
        (fixed && self.omits_weak()).then_some(
            "all schedules ran without weak loads, which need a seed: give one, or add a series \
             such as `random`",
        )
    }

    /// Runs all schedules; returns their number.
    ///
    /// # Errors
    ///
    /// The message of the first one that fails.
    pub(super) fn run(&self, run: &mut Run<'_>) -> Result<u64, String> {
        self.series.iter().try_fold(0, |ran, series| Ok(ran + self.run_series(*series, run)?))
    }

    fn run_series(&self, series: Series, run: &mut Run<'_>) -> Result<u64, String> {
        let first = self.simulation.random_seed().unwrap_or(0);
        let seeds = |given: u64| 0..self.schedules.unwrap_or(given);
        let seeded = |i: u64| self.simulation.clone().seed(first.wrapping_add(i));
        match series {
            Series::InOrder => {
                let weak = self.simulation.is_weak() && !self.omits_weak();
                let in_order = self.simulation.clone().weak(weak);
                run(&in_order)?;
                run(&in_order.preempt(true))?;
                Ok(2)
            }
            Series::Random(given) => {
                seeds(given).try_for_each(|i| run(&seeded(i)).map(drop))?;
                Ok(seeds(given).end)
            }
            Series::Lagging(given) => {
                for i in seeds(given) {
                    run(&seeded(i).lag(Lag::ALL[i as usize % Lag::ALL.len()]))?;
                }
                Ok(seeds(given).end)
            }
            Series::Pct { schedules, depth } => {
                // Priorities change within the length of the longest run so far.
                let mut steps = None;
                for i in seeds(schedules) {
                    let schedule = seeded(i).pct(depth);
                    let schedule = match steps {
                        Some(steps) => schedule.pct_steps(steps),
                        None => schedule,
                    };
                    // A PCT schedule has at least one step.
                    let ran = run(&schedule)?.map(|activity| activity.switches.max(1));
                    steps = steps.max(ran);
                }
                Ok(seeds(schedules).end)
            }
            Series::Exhaustive { limit } => self.exhaust(limit, run),
        }
    }

    /// Searches the choices depth-first: each run takes the next alternative at the last choice
    /// that has one. Ends with the first run that fails.
    fn exhaust(&self, limit: u64, run: &mut Run<'_>) -> Result<u64, String> {
        // The choices that the next run begins with, and how many alternatives each must have.
        let mut choices: Vec<u32> = Vec::new();
        let mut alternatives: Vec<u32> = Vec::new();
        for ran in 1..=limit {
            let Some(activity) = run(&self.simulation.clone().choices(&choices))? else {
                return Ok(ran);
            };
            let made = activity.choices;
            let mut pairs = made.iter().zip(&alternatives);
            if made.len() < alternatives.len() || !pairs.all(|(choice, of)| choice.of == *of) {
                return Err(format!(
                    "run {ran} had other alternatives than the run before it, with the same \
                     choices up to there: the program depends on something else, such as time, \
                     addresses or random numbers of its own"
                ));
            }
            let Some(last) = made.iter().rposition(|choice| choice.taken + 1 < choice.of) else {
                return Ok(ran);
            };
            alternatives = made[..=last].iter().map(|choice| choice.of).collect();
            choices = made[..=last].iter().map(|choice| choice.taken).collect();
            choices[last] += 1;
        }
        Err(format!(
            "there are more than {limit} schedules, and none of the first {limit} fails: raise the \
             limit, use fewer threads or accesses, or limit Simulation::preemptions"
        ))
    }
}

/// Returns the number of schedules that the variable's value gives.
fn schedules(value: Option<std::ffi::OsString>) -> Result<Option<u64>, String> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    let number = value.to_str().and_then(|text| text.parse().ok()).filter(|number| *number > 0);
    number.map(Some).ok_or_else(|| format!("{VARIABLE}={value:?} is not a number of schedules"))
}

#[cfg(test)]
mod tests {
    use devcomm_sim::Choice;

    use super::*;

    /// Runs the schedules of a series, and returns their settings.
    fn settings(series: Series, schedules: Option<u64>) -> Vec<String> {
        settings_of(Simulation::new(2), series, schedules)
    }

    fn settings_of(simulation: Simulation, series: Series, schedules: Option<u64>) -> Vec<String> {
        let mut ran = Vec::new();
        let plan = Plan { simulation: &simulation, series: &[series], schedules };
        let count = plan.run(&mut |simulation| {
            ran.push(simulation.to_string());
            let mut activity = Activity::default();
            activity.switches = 10 * ran.len() as u64;
            Ok(Some(activity))
        });
        assert_eq!(count, Ok(ran.len() as u64));
        ran
    }

    #[test]
    fn each_schedule_of_a_series_has_its_own_settings() {
        assert_eq!(settings(Series::InOrder, Some(9)), ["2", "2,preempt=1"]);
        assert_eq!(settings(Series::Random(2), None), ["2,seed=0", "2,seed=1"]);
        let lagging = ["2,seed=0,lag=thread", "2,seed=1,lag=warp", "2,seed=2,lag=block"];
        assert_eq!(settings(Series::Lagging(3), None), lagging);
        // Each run tells the next one how long it was.
        let pct = ["2,seed=0,pct=3", "2,seed=1,pct=3/10", "2,seed=2,pct=3/20"];
        assert_eq!(settings(Series::Pct { schedules: 3, depth: 3 }, None), pct);
    }

    #[test]
    fn fixed_orders_of_a_weak_machine_see_no_old_values() {
        let weak = || Simulation::new(2).weak(true);
        assert_eq!(settings_of(weak(), Series::InOrder, None), ["2", "2,preempt=1"]);
        let seeded = settings_of(weak().seed(3), Series::InOrder, None);
        assert_eq!(seeded, ["2,seed=3,weak=1", "2,seed=3,preempt=1,weak=1"]);
        assert_eq!(settings_of(weak(), Series::Random(1), None), ["2,seed=0,weak=1"]);
    }

    #[test]
    fn the_environment_replaces_the_number_of_schedules() {
        assert_eq!(settings(Series::Random(2), Some(7)).len(), 7);
        assert_eq!(schedules(Some("7".into())), Ok(Some(7)));
        assert_eq!(schedules(Some("".into())), Ok(None));
        for bad in ["0", "many", "-1"] {
            let refusal = schedules(Some(bad.into())).unwrap_err();
            assert_eq!(refusal, format!("DEVCOMM_SCHEDULES={bad:?} is not a number of schedules"));
        }
    }

    #[test]
    fn a_search_visits_every_leaf_of_the_tree_of_choices() {
        let simulation = Simulation::new(1);
        let plan = Plan { simulation: &simulation, series: &[], schedules: None };
        // A choice of three, and in the second branch one of two after that.
        let tree = |planned: &str| {
            let taken = planned.split_once("choices=").map_or("", |(_, taken)| taken);
            let first = match taken {
                "" => 0,
                "0:1" | "0:1-1:1" => 1,
                "0:2" => 2,
                other => panic!("{other}"),
            };
            let mut choices = vec![Choice { taken: first, of: 3 }];
            if first == 1 {
                choices.push(Choice { taken: u32::from(taken.ends_with("1:1")), of: 2 });
            }
            choices
        };
        let mut visited = Vec::new();
        let mut run = |simulation: &Simulation| {
            visited.push(simulation.to_string());
            let mut activity = Activity::default();
            activity.choices = tree(&visited[visited.len() - 1]);
            Ok(Some(activity))
        };
        assert_eq!(plan.exhaust(4, &mut run), Ok(4));
        let refusal = plan.exhaust(3, &mut run).unwrap_err();
        assert!(refusal.contains("more than 3 schedules"), "{refusal}");
        assert_eq!(
            visited[..4],
            ["1,choices=", "1,choices=0:1", "1,choices=0:1-1:1", "1,choices=0:2"]
        );
    }

    #[test]
    fn a_program_that_does_not_repeat_itself_is_refused() {
        let simulation = Simulation::new(1);
        let plan = Plan { simulation: &simulation, series: &[], schedules: None };
        let mut runs = 0;
        let refusal = plan.exhaust(10, &mut |_| {
            runs += 1;
            let mut activity = Activity::default();
            activity.choices = vec![Choice { taken: 0, of: 1 + runs }];
            Ok(Some(activity))
        });
        assert!(refusal.unwrap_err().contains("depends on something else"));
    }
}
