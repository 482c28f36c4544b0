// Python's view of the planner core: zbkern._planner. Lists in, lists out; the search runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "planner.h"

namespace py = pybind11;
using namespace zbkern;

namespace {

Problem problem_from(const py::object& source) {
  Problem p;
  p.ranks = source.attr("ranks").cast<int>();
  p.chunks = source.attr("chunks").cast<int>();
  p.microbatches = source.attr("microbatches").cast<int>();
  p.placement = source.attr("placement").cast<std::vector<int>>();
  const auto times = [&](const char* name) { return source.attr(name).cast<std::vector<Time>>(); };
  p.forward = times("forward"), p.backward = times("backward"), p.weight = times("weight"), p.fused = times("fused");
  p.communication = times("communication"), p.activation = times("activation"), p.held = times("held");
  p.merge_saving = times("merge_saving"), p.limit = times("limit");
  p.makespan = source.attr("makespan").cast<bool>();
  return p;
}

py::tuple tuple_from(const Ordering& orders) {
  return py::make_tuple(orders.cost, orders.rows, std::vector<int>(orders.fused.begin(), orders.fused.end()));
}

// As in list_scheduler.py.
using Ints = std::vector<int>;
using RuleTuple = std::tuple<Ints, Ints, Ints, Ints, Ints, bool, bool, bool>;

Rule rule_from(const RuleTuple& tuple) {
  return std::apply([](const auto&... parts) { return Rule{parts...}; }, tuple);
}

py::tuple tuple_from(const Rule& rule) {
  const auto each = [](const Ints& entries) { return py::tuple(py::cast(entries)); };
  return py::make_tuple(each(rule.priority), each(rule.patience), each(rule.late_forward), each(rule.late_backward), each(rule.caps),
                        rule.foresight, rule.fuse, rule.follow);
}

}  // namespace

PYBIND11_MODULE(_planner, module) {
  module.doc() = "The search core of zbkern.pipeline.planner, compiled.";
  module.def("list_schedule", [](const py::object& source, const RuleTuple& rule, Time cutoff) {
    return tuple_from(list_schedule(problem_from(source), rule_from(rule), cutoff));
  });
  module.def("best_rules", [](const py::object& source, const std::vector<RuleTuple>& tuples, int kept, double seconds) {
    const Problem problem = problem_from(source);
    std::vector<Rule> rules;
    for (const auto& each : tuples) rules.push_back(rule_from(each));
    py::gil_scoped_release release;
    return best_rules(problem, rules, kept, seconds);
  });
  module.def("refine", [](const py::object& source, const RuleTuple& rule, bool may_follow, std::int64_t tries, std::uint64_t seed,
                          Time target, double seconds) {
    const Problem problem = problem_from(source);
    RefineResult found;
    {
      py::gil_scoped_release release;
      found = refine(problem, rule_from(rule), may_follow, tries, seed, target, seconds);
    }
    return py::make_tuple(tuple_from(found.best), tuple_from(found.rule));
  });
  module.def("measure", [](const py::object& source, const Rows& rows, const std::vector<int>& fused) {
    const Measured found = measure(problem_from(source), {rows, std::vector<char>(fused.begin(), fused.end()), 0});
    return py::make_tuple(found.cost, found.peaks);
  });
  module.def("grouped", [](const Rows& rows, const std::vector<int>& fused) {
    return grouped({rows, std::vector<char>(fused.begin(), fused.end()), 0});
  });
  module.def("extended", [](const py::object& source, const Rows& rows, const std::vector<int>& fused) {
    return tuple_from(extended(problem_from(source), {rows, std::vector<char>(fused.begin(), fused.end()), 0}));
  });
  module.def("search_blocks", [](const py::object& source, std::uint64_t seed, const std::vector<Time>& temperatures,
                                 std::int64_t moves, Time target, bool fuse, double seconds) {
    const Problem problem = problem_from(source);
    Ordering found;
    {
      py::gil_scoped_release release;
      found = search_blocks(problem, seed, temperatures, moves, target, fuse, seconds);
    }
    return tuple_from(found);
  });
  module.def("search_patterns", [](const py::object& source, const Pattern& start, std::uint64_t seed,
                                   const std::vector<Time>& temperatures, std::int64_t moves, Time spread, Time target,
                                   double seconds) {
    const Problem problem = problem_from(source);
    PatternResult found;
    {
      py::gil_scoped_release release;
      found = search_patterns(problem, start, seed, temperatures, moves, spread, target, seconds);
    }
    return py::make_tuple(tuple_from(found.best), found.pattern);
  });
  module.def("anneal", [](const py::object& source, const Rows& rows, const std::vector<int>& fused, std::uint64_t seed,
                          const std::vector<Time>& temperatures, std::int64_t work, Time spread, Time target, bool may_fuse,
                          double seconds) {
    const Problem problem = problem_from(source);
    const Ordering start{rows, std::vector<char>(fused.begin(), fused.end()), 0};
    AnnealResult result;
    {
      py::gil_scoped_release release;
      result = anneal(problem, start, {seed, temperatures, work, spread, target, may_fuse, seconds});
    }
    return py::make_tuple(tuple_from(result.best), result.finished);
  });
}
